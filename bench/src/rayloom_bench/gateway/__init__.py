"""`rayloom-engine bench gateway`: CPU time of the gateway for each streamed event, compared with other proxies.

command.py parses flags and prints; rounds.py measures the servers in turn; load.py is the client; servers.py starts the
gateway and the proxies; engine.py is an engine without a model; upstream.py is a plain server that streams the same
events to the proxies; aiohttp_proxy.py is a proxy. text.py makes the tokenizer and the words of the answers; page.py
formats the figures.
"""
