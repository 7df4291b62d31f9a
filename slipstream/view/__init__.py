"""What people see of a run: live view, top, status, dashboard, trace and plots."""
