"""What processes use (memory, descriptors, threads, device), how it grows, and where that can be read."""
