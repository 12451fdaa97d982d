"""The part of kvtier that every inference engine needs. Imports no engine.

An engine's own package makes a `RequestView` of each request and a `Step` of each step for the `SchedulerSide`, and
carries its `StepPlan` to a `WorkerSide` in each worker process.
"""
