"""llama.cpp over RPC: a worker per stage, and a head beside stage 0 that drives them through tunnels."""
