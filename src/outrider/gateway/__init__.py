"""The edge as an HTTP server with OpenAI's API: many clients on one drafter."""
