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
use larder_vm::control::response::{Answer, event_stream, whole};
use serde_json::json;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::assets::{Asset, INDEX, LOGIN, asset};
use crate::auth::is_own_name;
use crate::events::follow;
use crate::fleet::Fleet;
use crate::frames::{of_fleet, of_vm};
use crate::listen::ListenAddress;
use crate::metrics::{Format, render};
use crate::migration_frames::of_migration;
use crate::server::{Client, Site};

/// Longest request body, in bytes, and the time within which it must arrive.
const BODY_BYTES_MAX: usize = 8 << 10;
const BODY_TIME_MAX: Duration = Duration::from_secs(5);

/// Time after which an event-stream client that reads nothing is dropped.
const STUCK: Duration = Duration::from_secs(30);

/// Events of a VM that are queued for a client.
const EVENTS_MAX: usize = 64;

/// Content security policy: a browser may only display the pages.
const POLICY: &str =
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'";

pub(crate) async fn answer(request: Request<Incoming>, site: &Site, client: &Client) -> Answer {
    let mut answer = match refuse(&request, site) {
        Some(refused) => refused,
        None => of_page(request, site, client).await,
    };
    let headers = answer.headers_mut();
    for (name, value) in [
        (CONTENT_SECURITY_POLICY, POLICY),
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
fn refuse(request: &Request<Incoming>, site: &Site) -> Option<Answer> {
    let path = request.uri().path();
    // With TLS a browser checks the name against the certificate.
    let address = match &site.listen {
        ListenAddress::Tcp(address) => Some(address),
        ListenAddress::Unix(_) => None,
    };
    if site.access.tls.is_none() && !is_own_name(request.headers(), address.map(SocketAddr::ip)) {
        let port = address
            .map(|address| format!(":{}", address.port()))
            .unwrap_or_default();
        let why =
            format!("this server does not have that host name; use http://localhost{port}/, or send Host: localhost");
        return Some(plain(StatusCode::MISDIRECTED_REQUEST, why));
    }
    let token = site.access.token.as_ref()?;
    if path == "/login" || asset(path).is_some() || token.lets_in(request.headers()) {
        return None;
    }
    let accepts = request.headers().get(ACCEPT).and_then(|value| value.to_str().ok());
    if request.method() == Method::GET && accepts.is_some_and(|accepts| accepts.contains("text/html")) {
        return Some(see("/login"));
    }
    let why = "authentication required: send `Authorization: Bearer TOKEN`, with the first line of the file that `larder host` logs as token_file at its start";
    let mut refused = plain(StatusCode::UNAUTHORIZED, why);
    refused
        .headers_mut()
        .insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    Some(refused)
}

async fn of_page(request: Request<Incoming>, site: &Site, client: &Client) -> Answer {
    let path = request.uri().path().to_owned();
    if path == "/login" && request.method() == Method::POST {
        return log_in(request, site).await;
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut refused = plain(
            StatusCode::METHOD_NOT_ALLOWED,
            "this server changes nothing: use GET or HEAD",
        );
        refused
            .headers_mut()
            .insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return refused;
    }
    let is_head = request.method() == Method::HEAD;
    match path.as_str() {
        "/" => file(&INDEX),
        "/login" if site.access.token.is_some() => file(&LOGIN),
        "/metrics" => {
            site.fleet.refresh().await;
            let format = Format::accepted(request.headers());
            whole(StatusCode::OK, format.content_type(), render(&site.fleet, format))
        }
        "/api/fleet" if !is_head => stream(site, client, tell_fleet),
        path if !is_head && path.starts_with("/api/migration/") => {
            match path.strip_prefix("/api/migration/").and_then(decoded) {
                Some(key) => stream(site, client, |fleet, client| tell_migration(fleet, key, client)),
                None => plain(StatusCode::NOT_FOUND, "not the name of a migration"),
            }
        }
        path => match (asset(path), path.strip_prefix("/api/vm/").and_then(decoded)) {
            (Some(asset), _) => file(&asset),
            (None, Some(name)) if !is_head => stream(site, client, |fleet, client| tell_vm(fleet, name, client)),
            _ => plain(StatusCode::NOT_FOUND, "no such page; there are / and /metrics"),
        },
    }
}

/// Checks the token that a browser sends, and sets a cookie for it.
async fn log_in(request: Request<Incoming>, site: &Site) -> Answer {
    let Some(token) = &site.access.token else {
        return plain(StatusCode::NOT_FOUND, "this server needs no token");
    };
    let body = Limited::new(request.into_body(), BODY_BYTES_MAX).collect();
    let Ok(Ok(body)) = timeout(BODY_TIME_MAX, body).await else {
        return plain(StatusCode::BAD_REQUEST, "the body is not a form");
    };
    let body = body.to_bytes();
    let form = String::from_utf8_lossy(&body);
    let said = form
        .split('&')
        .find_map(|field| field.strip_prefix("token="))
        .unwrap_or_default();
    match decoded(&said.replace('+', " ")).is_some_and(|said| token.is(said.trim().as_bytes())) {
        true => {
            let mut answer = see("/");
            let cookie = token.cookie(site.access.tls.is_some());
            if let Ok(cookie) = HeaderValue::from_str(&cookie) {
                answer.headers_mut().insert(SET_COOKIE, cookie);
            }
            answer
        }
        false => see("/login#wrong"),
    }
}

/// Decodes percent-encoding (RFC 3986, 2.1); returns `None` if the result is not UTF-8.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        bytes.push(match first {
            b'%' => {
                let digits = std::str::from_utf8(after.get(..2)?).ok()?;
                rest = &after[2..];
                u8::from_str_radix(digits, 16).ok()?
            }
            byte => *byte,
        });
    }
    String::from_utf8(bytes).ok()
}

/// Streams the events that the callback sends.
fn stream<F>(site: &Site, client: &Client, tell: impl FnOnce(Arc<Fleet>, Follower) -> F) -> Answer
where
    F: Future<Output = ()> + Send + 'static,
{
    let Ok(room) = Arc::clone(&site.streams).try_acquire_owned() else {
        return plain(
            StatusCode::SERVICE_UNAVAILABLE,
            "too many dashboards are open; close one of them",
        );
    };
    client.follows();
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(tell(Arc::clone(&site.fleet), Follower { sender, _room: room }));
    event_stream(receiver)
}

/// Browser that receives an event stream.
struct Follower {
    sender: mpsc::Sender<Bytes>,
    _room: OwnedSemaphorePermit,
}

impl Follower {
    /// Sends an event; returns false if the browser does not accept it in time.
    async fn hears(&self, event: &str, data: &str) -> bool {
        let text = format!("event: {event}\ndata: {data}\n\n");
        matches!(timeout(STUCK, self.sender.send(text.into())).await, Ok(Ok(())))
    }
}

async fn tell_fleet(fleet: Arc<Fleet>, client: Follower) {
    let mut watcher = fleet.watch();
    fleet.refresh().await;
    while client.hears("fleet", &of_fleet(&fleet)).await {
        tokio::select! {
            () = watcher.next() => {}
            () = client.sender.closed() => return,
        }
    }
}

async fn tell_migration(fleet: Arc<Fleet>, key: String, client: Follower) {
    let mut watcher = fleet.watch();
    fleet.refresh().await;
    while client.hears("migration", &of_migration(&fleet, &key)).await {
        tokio::select! {
            () = watcher.next() => {}
            () = client.sender.closed() => return,
        }
    }
}

/// Subscription to the events of a server; dropping it ends the subscription.
struct Following {
    path: PathBuf,
    task: AbortHandle,
    _room: OwnedSemaphorePermit,
}

impl Drop for Following {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn tell_vm(fleet: Arc<Fleet>, name: String, client: Follower) {
    let mut watcher = fleet.watch();
    fleet.refresh().await;
    let (events, mut happens) = mpsc::channel(EVENTS_MAX);
    let mut following: Vec<Following> = Vec::new();
    loop {
        let vm = of_vm(&fleet, &name);
        let text = vm.as_ref().map_or_else(
            || "{\"vm\":null,\"disks\":[],\"memory\":null,\"migrations\":[]}".to_owned(),
            |vm| vm.text(),
        );
        if !client.hears("vm", &text).await {
            return;
        }
        if let Some(vm) = vm {
            following.retain(|it| vm.paths.contains(&it.path));
            for path in vm.paths {
                if !following.iter().any(|it| it.path == path) {
                    following.extend(begin_following(&fleet, path, events.clone()));
                }
            }
        }
        loop {
            tokio::select! {
                () = watcher.next() => break,
                () = client.sender.closed() => return,
                Some(event) = happens.recv() => {
                    if !client.hears("log", &json!(event).to_string()).await {
                        return;
                    }
                }
            }
        }
    }
}

/// Subscribes to the events of a VM's server, unless it already has so many subscribers that other clients would be
/// refused.
fn begin_following(fleet: &Fleet, path: PathBuf, events: mpsc::Sender<Event>) -> Option<Following> {
    let listeners = fleet.vms().get(&path).map(|vm| Arc::clone(&vm.listeners))?;
    let room = listeners.try_acquire_owned().ok()?;
    let of = path.clone();
    let task = tokio::spawn(async move { follow(&of, &events).await }).abort_handle();
    Some(Following {
        path,
        task,
        _room: room,
    })
}

fn file(asset: &Asset) -> Answer {
    whole(StatusCode::OK, asset.content_type, asset.bytes)
}

fn plain(status: StatusCode, text: impl Into<String>) -> Answer {
    whole(status, "text/plain; charset=utf-8", text.into() + "\n")
}

fn see(other: &'static str) -> Answer {
    let mut answer = plain(StatusCode::SEE_OTHER, other);
    answer.headers_mut().insert(LOCATION, HeaderValue::from_static(other));
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_decoded() {
        assert_eq!(decoded("a%20%C3%A9b"), Some("a éb".to_owned()));
        for none in ["%", "%2", "%zz", "%ff", "a%é"] {
            assert_eq!(decoded(none), None, "{none}");
        }
    }
}
