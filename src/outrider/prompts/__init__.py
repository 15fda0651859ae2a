"""What goes in: chat templates, recordings, caption tasks."""
