"""`rayloom-engine bench gateway`: CPU time of the gateway for each streamed event, beside other proxies.

command.py parses flags and prints; rounds.py measures the servers in turn; load.py is the client; servers.py starts the
gateway and the proxies; engine.py is an engine without a model, upstream.py the same as a plain server of events for
the proxies, aiohttp_proxy.py a proxy; text.py makes their tokenizer and the words of their answers; page.py formats.
"""
