"""A rank: applies StepPlans to its slots, runs the model, chooses tokens. Decides nothing else."""
