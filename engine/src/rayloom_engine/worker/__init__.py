"""The worker ("rank"): a process that applies StepPlans to its slots, runs its part of the model and chooses tokens."""
