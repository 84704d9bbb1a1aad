//! HTTP responses of the control socket and the dashboard.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Bytes, Frame};
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use hyper::{Response, StatusCode};
use tokio::sync::mpsc;

/// A response with any kind of body.
pub type HttpResponse = Response<UnsyncBoxBody<Bytes, Infallible>>;

/// Returns a response with a complete body.
pub fn full_response(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> HttpResponse {
    let mut response = Response::new(Full::new(body.into()).boxed_unsync());
    *response.status_mut() = status;
    let kind = HeaderValue::from_static(content_type);
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}

/// Returns a response of server-sent events (HTML standard, 9.2), which ends when the sender is dropped.
pub fn event_stream(events: mpsc::Receiver<Bytes>) -> HttpResponse {
    let mut response = Response::new(ChannelBody(events).boxed_unsync());
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

/// Body that is sent in parts.
struct ChannelBody(mpsc::Receiver<Bytes>);

impl Body for ChannelBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let chunk = self.0.poll_recv(context);
        chunk.map(|text| text.map(|text| Ok(Frame::data(text))))
    }
}
