"""Errors as HTTP answers, for every path alike, and the request id of every answer."""

from collections.abc import Callable
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from multidict import CIMultiDict

from common.runtime.lifecycle import Log
from contracts.errors import ErrorCode, ErrorInfo, PdmeshError
from services.router.answer_headers import REQUEST_ID, request_id_of
from services.router.core.answers import body, error_body

REQUEST_ID_KEY: Final = web.RequestKey("request_id", str)
ERROR_CODE_KEY: Final = web.RequestKey("error_code", str)
"""The code of the error with which a request was answered, for whoever counts."""

RetryAfter = Callable[[ErrorInfo], int]
"""Gives the seconds after which a client may come back that is turned away with an error."""

_MAX_SHOWN_CHARS: Final = 200


def error_response(error: ErrorInfo, request_id: str, *, retry_after: RetryAfter) -> web.Response:
    """Return an error as an HTTP answer. One that a retry may cure says when; any other says that none will."""
    rule = error.rule
    headers: CIMultiDict[str] = CIMultiDict({"x-should-retry": "true" if rule.retryable else "false"})
    if rule.http_status in {429, 503}:
        headers["Retry-After"] = str(retry_after(error))
    return web.Response(
        status=rule.http_status,
        body=body(error_body(error, request_id)),
        headers=headers,
        content_type="application/json",
    )


def error_middleware(log: Log, *, retry_after: RetryAfter) -> Middleware:
    """Return the middleware that turns whatever a handler raises into an answer that clients understand."""

    @web.middleware
    async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        request_id = request[REQUEST_ID_KEY] = request_id_of(request)
        try:
            response = await handler(request)
        except PdmeshError as error:
            request[ERROR_CODE_KEY] = str(error.code)
            response = error_response(error.info, request_id, retry_after=retry_after)
        except web.HTTPException as error:
            response = translated(request, error, request_id)
            request[ERROR_CODE_KEY] = str(_code_of(error))
        except ConnectionResetError:
            raise  # the client has gone: nobody reads an answer
        except Exception as error:
            # The client is owed an answer, and the log has the rest.
            log.error("request_crashed", path=request.path, error=repr(error), exc_info=error)  # noqa: TRY400 - Log's
            info = ErrorInfo(code=ErrorCode.INTERNAL, message="something went wrong inside the server")
            request[ERROR_CODE_KEY] = str(info.code)
            response = error_response(info, request_id, retry_after=retry_after)
        if not response.prepared:
            response.headers[REQUEST_ID] = request_id
            if request.content.exception() is not None:
                response.force_close()  # where a broken body ends and the next request begins cannot be told
        return response

    return answer_errors


def translated(request: web.BaseRequest, error: web.HTTPException, request_id: str) -> web.StreamResponse:
    """Return aiohttp's own refusals (no such path, no such method, an expectation of the client's) in our form."""
    if error.status < 400:
        raise error
    message = f"{request.method[:_MAX_SHOWN_CHARS]} {request.path[:_MAX_SHOWN_CHARS]}: {error.reason}"
    info = ErrorInfo(code=_code_of(error), message=message)
    headers = {name: value for name, value in error.headers.items() if name == "Allow"}
    return web.Response(
        status=error.status, body=body(error_body(info, request_id)), headers=headers, content_type="application/json"
    )


def _code_of(error: web.HTTPException) -> ErrorCode:
    return ErrorCode.BODY_TOO_LARGE if error.status == 413 else ErrorCode.INVALID_REQUEST
