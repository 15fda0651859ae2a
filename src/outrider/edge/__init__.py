"""The side that drafts."""
