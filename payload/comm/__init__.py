"""How ranks talk: one interface (``base``), one module a transport."""
