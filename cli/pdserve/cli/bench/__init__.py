"""`pdserve bench`: sends load to an OpenAI or gRPC end point and reports latencies, throughput and goodput."""
