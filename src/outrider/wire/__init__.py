"""What edge and cloud say to each other, and how they know each other."""
