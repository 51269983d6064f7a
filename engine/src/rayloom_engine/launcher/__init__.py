"""The launcher process: starts workers ("ranks") and restarts dead workers.

If the launcher dies, its ranks die, too. The ranks are then started again, and no request is lost.

process_ranks  executor mp, with fork_server
ray_ranks      executor ray, with local_ray and placement
"""
