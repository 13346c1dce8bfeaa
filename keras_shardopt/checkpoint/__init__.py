"""Files that several replicas write and read together."""
