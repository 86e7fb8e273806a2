"""OpenAI's Responses API: bodies, items, answers and their events, and the store of responses."""
