"""The gRPC front end: `InferenceService` and health."""
