"""The HTTP front end: routes and responses. OpenAI's messages are in `openai`."""
