"""What people watch a run with: experiment trackers, and a live view in the terminal."""
