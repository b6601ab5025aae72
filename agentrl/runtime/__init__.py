"""Run async code: threads, processes, deadlines, stalls, interruptions, and who was busy when."""
