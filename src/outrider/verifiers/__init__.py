"""What can give a verdict."""
