"""The standard health service, with bounds on the resources of unauthenticated callers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2

SERVICE = "grpc.health.v1.Health"
MAX_CONCURRENT_REQUESTS = 16  # requests that are being received
MAX_WATCHERS = 64  # streams of Watch
RECEIVE_TIMEOUT_S = 5.0  # s


def health_handlers(servicer: health.aio.HealthServicer) -> grpc.GenericRpcHandler:
    """Return Check and Watch of `servicer`, as streams: gRPC would receive a unary call's whole request first."""
    receiving, watching = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS), asyncio.Semaphore(MAX_WATCHERS)

    async def read_request(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckRequest:
        try:
            async with receiving, asyncio.timeout(RECEIVE_TIMEOUT_S):
                return health_pb2.HealthCheckRequest.FromString(await anext(aiter(requests)))
        except (DecodeError, StopAsyncIteration, TimeoutError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "expected one HealthCheckRequest")
            raise

    async def check(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        return await servicer.Check(await read_request(requests, context), context)

    async def watch(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        if watching.locked():
            message = f"{MAX_WATCHERS} callers are watching, the most allowed: use Check"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        async with watching:
            request = await read_request(requests, context)
            await servicer.Watch(request, context)
        return
        yield

    serialize = health_pb2.HealthCheckResponse.SerializeToString
    methods = {
        "Check": grpc.stream_unary_rpc_method_handler(check, response_serializer=serialize),
        "Watch": grpc.stream_stream_rpc_method_handler(watch, response_serializer=serialize),
    }
    return grpc.method_handlers_generic_handler(SERVICE, methods)
