"""The messages between edge and cloud: protobuf schema, conversion and validation."""
