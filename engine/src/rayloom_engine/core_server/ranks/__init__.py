"""The EngineCore's side of its workers ("ranks"): how they attach, are assembled, run plans, and are found to hang."""
