"""Running one API server process: lifecycle, metrics, health, status document and admin port."""
