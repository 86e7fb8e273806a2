"""Chat templates: the model's own, and those that come with requests, each with its budget."""
