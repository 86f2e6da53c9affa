"""Process launcher, `backhaul up`: starts engines, waits until they serve, and stops them. Runs beside vLLM, not inside it."""
