"""Prompts: chat templates, recordings and caption tasks."""
