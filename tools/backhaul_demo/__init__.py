"""`backhaul demo`: an agent's turns with reuse off and on, on engines without a model."""
