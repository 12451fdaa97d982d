"""An inference engine without a model, for what only a device can get wrong: the order of what is enqueued on it.

Its scheduler lives in this process, a worker of each rank in another one; they share a real arena, and the real
messages pass between them. What vLLM does to a connector happens here: the host runs two steps ahead of the device and
learns of each step later, blocks are given away while stores still read them, requests are preempted, resumed and
aborted at any moment. Each forward compares every token that it reads with what must be there, and counts what is not.

    content       what a token's KV is, and the forward that compares and writes it
    devices       a simulated device, and CUDA with graphs
    late_cuda     the driver of the simulated one
    memory        pages that can be unmapped for a sleep
    worker        the process of one rank
    scheduling    what the scheduler of any engine does; also that of `fake_host`
    engine        the scheduler's process, and the traffic
    bugs          what the engine must notice: a planted bug for each rule of docs/internals/gpu.md
"""
