"""`specctl reason`: lookahead reasoning along a stream."""
