"""The EngineCore's connections to its workers ("ranks"): attaching, assembly, running plans, and detection of hangs."""
