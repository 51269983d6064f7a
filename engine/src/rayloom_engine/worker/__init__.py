"""The worker: a rank applies StepPlans to its slots, runs its part of the model and chooses tokens."""
