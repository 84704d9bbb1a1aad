//! Request handlers of the HTTP server.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{
    ACCEPT, ALLOW, CACHE_CONTROL, CONTENT_SECURITY_POLICY, HeaderName, HeaderValue, LOCATION, REFERRER_POLICY,
    SET_COOKIE, WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS,
};
use hyper::{Method, Request, StatusCode};
use larder_vm::control::events::Event;
use larder_vm::control::http_response::{HttpResponse, event_stream, full_response};
use serde_json::json;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::assets::{Asset, INDEX, LOGIN, asset};
use crate::auth::is_local_host_name;
use crate::events::forward_events;
use crate::fleet::Fleet;
use crate::frames::{fleet_frame, vm_page};
use crate::listen::ListenAddress;
use crate::metrics::{ExpositionFormat, render};
use crate::migration_frames::migration_frame;
use crate::server::{ClientActivity, ServerContext};

/// Longest request body, in bytes, and the time within which it must arrive.
const BODY_BYTES_MAX: usize = 8 << 10;
const BODY_TIME_MAX: Duration = Duration::from_secs(5);

/// Time after which an event-stream client that reads nothing is dropped.
const CLIENT_STALL_TIMEOUT: Duration = Duration::from_secs(30);

/// Events of a VM that are queued for a client.
const QUEUED_EVENTS_MAX: usize = 64;

/// Content security policy: a browser may only display the pages.
const CONTENT_SECURITY_POLICY_VALUE: &str =
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'";

pub(crate) async fn handle(request: Request<Incoming>, site: &ServerContext, client: &ClientActivity) -> HttpResponse {
    let mut answer = match refuse(&request, site) {
        Some(refused) => refused,
        None => serve_page(request, site, client).await,
    };
    let headers = answer.headers_mut();
    for (name, value) in [
        (CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY_VALUE),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
        (CACHE_CONTROL, "no-cache"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    answer
}

/// Returns the response to a client that may not see the page, or `None` if it may.
fn refuse(request: &Request<Incoming>, site: &ServerContext) -> Option<HttpResponse> {
    let path = request.uri().path();
    // With TLS a browser checks the name against the certificate.
    let address = match &site.listen {
        ListenAddress::Tcp(address) => Some(address),
        ListenAddress::Unix(_) => None,
    };
    if site.access.tls.is_none() && !is_local_host_name(request.headers(), address.map(SocketAddr::ip)) {
        let port = address.map(|address| format!(":{}", address.port())).unwrap_or_default();
        let why =
            format!("this server does not have that host name; use http://localhost{port}/, or send Host: localhost");
        return Some(plain_text(StatusCode::MISDIRECTED_REQUEST, why));
    }
    let token = site.access.token.as_ref()?;
    if path == "/login" || asset(path).is_some() || token.authorizes(request.headers()) {
        return None;
    }
    let accepts = request.headers().get(ACCEPT).and_then(|value| value.to_str().ok());
    if request.method() == Method::GET && accepts.is_some_and(|accepts| accepts.contains("text/html")) {
        return Some(redirect("/login"));
    }
    let why = "authentication required: send `Authorization: Bearer TOKEN`, with the first line of the file that `larder host` logs as token_file at its start";
    let mut refused = plain_text(StatusCode::UNAUTHORIZED, why);
    refused.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    Some(refused)
}

async fn serve_page(request: Request<Incoming>, site: &ServerContext, client: &ClientActivity) -> HttpResponse {
    let path = request.uri().path().to_owned();
    if path == "/login" && request.method() == Method::POST {
        return log_in(request, site).await;
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut refused = plain_text(StatusCode::METHOD_NOT_ALLOWED, "this server changes nothing: use GET or HEAD");
        refused.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return refused;
    }
    let is_head = request.method() == Method::HEAD;
    match path.as_str() {
        "/" => file(&INDEX),
        "/login" if site.access.token.is_some() => file(&LOGIN),
        "/metrics" => {
            site.fleet.refresh().await;
            let format = ExpositionFormat::accepted(request.headers());
            full_response(StatusCode::OK, format.content_type(), render(&site.fleet, format))
        }
        "/api/fleet" if !is_head => stream(site, client, stream_fleet),
        path if !is_head && path.starts_with("/api/migration/") => {
            match path.strip_prefix("/api/migration/").and_then(percent_decode) {
                Some(key) => stream(site, client, |fleet, client| stream_migration(fleet, key, client)),
                None => plain_text(StatusCode::NOT_FOUND, "not the name of a migration"),
            }
        }
        path => match (asset(path), path.strip_prefix("/api/vm/").and_then(percent_decode)) {
            (Some(asset), _) => file(&asset),
            (None, Some(name)) if !is_head => stream(site, client, |fleet, client| stream_vm(fleet, name, client)),
            _ => plain_text(StatusCode::NOT_FOUND, "no such page; there are / and /metrics"),
        },
    }
}

/// Checks the token that a browser sends, and sets a cookie for it.
async fn log_in(request: Request<Incoming>, site: &ServerContext) -> HttpResponse {
    let Some(token) = &site.access.token else {
        return plain_text(StatusCode::NOT_FOUND, "this server needs no token");
    };
    let body = Limited::new(request.into_body(), BODY_BYTES_MAX).collect();
    let Ok(Ok(body)) = timeout(BODY_TIME_MAX, body).await else {
        return plain_text(StatusCode::BAD_REQUEST, "the body is not a form");
    };
    let body = body.to_bytes();
    let form = String::from_utf8_lossy(&body);
    let submitted = form.split('&').find_map(|field| field.strip_prefix("token=")).unwrap_or_default();
    match percent_decode(&submitted.replace('+', " "))
        .is_some_and(|submitted| token.matches(submitted.trim().as_bytes()))
    {
        true => {
            let mut answer = redirect("/");
            let cookie = token.cookie(site.access.tls.is_some());
            if let Ok(cookie) = HeaderValue::from_str(&cookie) {
                answer.headers_mut().insert(SET_COOKIE, cookie);
            }
            answer
        }
        false => redirect("/login#wrong"),
    }
}

/// Decodes percent-encoding (RFC 3986, 2.1); returns `None` if the result is not UTF-8.
fn percent_decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut remaining = text.as_bytes();
    while let Some((first, after)) = remaining.split_first() {
        remaining = after;
        bytes.push(match first {
            b'%' => {
                let digits = std::str::from_utf8(after.get(..2)?).ok()?;
                remaining = &after[2..];
                u8::from_str_radix(digits, 16).ok()?
            }
            byte => *byte,
        });
    }
    String::from_utf8(bytes).ok()
}

/// Streams the events that the callback sends.
fn stream<F>(
    site: &ServerContext,
    client: &ClientActivity,
    produce: impl FnOnce(Arc<Fleet>, StreamClient) -> F,
) -> HttpResponse
where
    F: Future<Output = ()> + Send + 'static,
{
    let Ok(permit) = Arc::clone(&site.streams).try_acquire_owned() else {
        return plain_text(StatusCode::SERVICE_UNAVAILABLE, "too many dashboards are open; close one of them");
    };
    client.start_streaming();
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(produce(Arc::clone(&site.fleet), StreamClient { sender, _permit: permit }));
    event_stream(receiver)
}

/// Browser that receives an event stream.
struct StreamClient {
    sender: mpsc::Sender<Bytes>,
    _permit: OwnedSemaphorePermit,
}

impl StreamClient {
    /// Sends an event; returns false if the browser does not accept it in time.
    async fn send(&self, event: &str, data: &str) -> bool {
        let text = format!("event: {event}\ndata: {data}\n\n");
        matches!(timeout(CLIENT_STALL_TIMEOUT, self.sender.send(text.into())).await, Ok(Ok(())))
    }
}

async fn stream_fleet(fleet: Arc<Fleet>, client: StreamClient) {
    let mut watcher = fleet.watch();
    fleet.refresh().await;
    while client.send("fleet", &fleet_frame(&fleet)).await {
        tokio::select! {
            () = watcher.next() => {}
            () = client.sender.closed() => return,
        }
    }
}

async fn stream_migration(fleet: Arc<Fleet>, key: String, client: StreamClient) {
    let mut watcher = fleet.watch();
    fleet.refresh().await;
    while client.send("migration", &migration_frame(&fleet, &key)).await {
        tokio::select! {
            () = watcher.next() => {}
            () = client.sender.closed() => return,
        }
    }
}

/// Subscription to the events of a server; dropping it ends the subscription.
struct EventSubscription {
    path: PathBuf,
    task: AbortHandle,
    _permit: OwnedSemaphorePermit,
}

impl Drop for EventSubscription {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn stream_vm(fleet: Arc<Fleet>, name: String, client: StreamClient) {
    let mut watcher = fleet.watch();
    fleet.refresh().await;
    let (events, mut event_receiver) = mpsc::channel(QUEUED_EVENTS_MAX);
    let mut subscriptions: Vec<EventSubscription> = Vec::new();
    loop {
        let vm = vm_page(&fleet, &name);
        let text = vm.as_ref().map_or_else(
            || "{\"vm\":null,\"disks\":[],\"memory\":null,\"migrations\":[]}".to_owned(),
            |vm| vm.to_json(),
        );
        if !client.send("vm", &text).await {
            return;
        }
        if let Some(vm) = vm {
            subscriptions.retain(|subscription| vm.paths.contains(&subscription.path));
            for path in vm.paths {
                if !subscriptions.iter().any(|subscription| subscription.path == path) {
                    subscriptions.extend(subscribe(&fleet, path, events.clone()));
                }
            }
        }
        loop {
            tokio::select! {
                () = watcher.next() => break,
                () = client.sender.closed() => return,
                Some(event) = event_receiver.recv() => {
                    if !client.send("log", &json!(event).to_string()).await {
                        return;
                    }
                }
            }
        }
    }
}

/// Subscribes to the events of a VM's server, unless it already has so many subscribers that other clients would be
/// refused.
fn subscribe(fleet: &Fleet, path: PathBuf, events: mpsc::Sender<Event>) -> Option<EventSubscription> {
    let listeners = fleet.vms().get(&path).map(|vm| Arc::clone(&vm.subscriptions))?;
    let permit = listeners.try_acquire_owned().ok()?;
    let task_path = path.clone();
    let task = tokio::spawn(async move { forward_events(&task_path, &events).await }).abort_handle();
    Some(EventSubscription { path, task, _permit: permit })
}

fn file(asset: &Asset) -> HttpResponse {
    full_response(StatusCode::OK, asset.content_type, asset.bytes)
}

fn plain_text(status: StatusCode, text: impl Into<String>) -> HttpResponse {
    full_response(status, "text/plain; charset=utf-8", text.into() + "\n")
}

fn redirect(location: &'static str) -> HttpResponse {
    let mut answer = plain_text(StatusCode::SEE_OTHER, location);
    answer.headers_mut().insert(LOCATION, HeaderValue::from_static(location));
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_decoded() {
        assert_eq!(percent_decode("a%20%C3%A9b"), Some("a éb".to_owned()));
        for none in ["%", "%2", "%zz", "%ff", "a%é"] {
            assert_eq!(percent_decode(none), None, "{none}");
        }
    }
}
