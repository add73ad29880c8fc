"""The service: gRPC around kvcore, one process a node."""
