"""OpenAI's requests and responses: fields, their limits, and how answers are written."""
