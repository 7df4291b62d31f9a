"""What all processes share: their end with their parent, hang reports, vitals, traces. No torch."""
