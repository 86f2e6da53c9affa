"""`backhaul up`: starts prefill and decode engines, waits until they serve, and stops them. Runs beside vLLM, not inside it."""
