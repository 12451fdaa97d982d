"""Memory that outlives its server: what it holds, who may touch it, and how the next server takes it over."""
