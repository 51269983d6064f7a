"""The launcher process: starts workers ("ranks") and restarts dead ones. Its own death costs the ranks, no request.

process_ranks (executor mp, with fork_server)   ray_ranks (executor ray, with local_ray and placement)
"""
