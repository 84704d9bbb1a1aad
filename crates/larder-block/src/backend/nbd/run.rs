//! The lifetime of an export's connection: it carries requests until it breaks, and is then re-established.
//!
//! One task does both directions. After a reconnect the log is replayed first, then all unanswered requests are sent
//! again in their old order, then new requests follow. So every change arrives after the changes that were
//! acknowledged before it.

use std::cell::Cell;
use std::collections::VecDeque;
use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

use super::Shared;
use super::connect::{Connection, connect};
use super::error::{ConnectError, ConnectionLoss};
use super::log::Entry;
use super::receive::{Receiver, read_error_chunk, read_header};
use super::transmit::transmit;
use crate::error::Failure;
use crate::event_loop::LoopTime;
use crate::nbd::CommandFlags;
use crate::nbd::flags::errors;
use crate::nbd::transmission::{ReplyHeader, RequestHeader, chunks};
use crate::signal::first_of;
use crate::units::{ByteLen, ByteRange};

/// The pause before the second attempt to reconnect in an outage. It doubles with each attempt, up to
/// [`RETRY_DELAY_MAX`].
const RETRY_DELAY_MIN: Duration = Duration::from_millis(10);

/// The maximum pause between attempts to reconnect.
const RETRY_DELAY_MAX: Duration = Duration::from_secs(1);

/// The maximum number of changes that are replayed at the same time.
const REPLAY_WINDOW: usize = 32;

/// A time without a working connection: from a lost connection until the server answers a request. A handshake does
/// not end it, because a server may complete every handshake and break the protocol afterwards.
struct Outage {
    /// The start of the time after which requests fail.
    start: LoopTime,
    /// The pause before the next attempt to reconnect.
    retry_delay: Duration,
}

impl Outage {
    fn new(start: LoopTime) -> Self {
        let retry_delay = Duration::ZERO;
        Self { start, retry_delay }
    }
}

/// Keeps the export connected until the device is closed.
pub(super) async fn maintain_connection(shared: Rc<Shared>, first: Connection) {
    let limit = shared.options.reconnect;
    let mut connection = first;
    let mut outage = Outage::new(shared.on.now());
    loop {
        let connected_at = shared.on.now();
        let (answered, had_waiting) = {
            let requests = shared.requests.borrow();
            (requests.answered(), requests.unanswered() > 0)
        };
        let why = run_connection(&shared, connection).await;
        let Some(why) = why else { return };
        let (unanswered, is_answered) = {
            let mut requests = shared.requests.borrow_mut();
            requests.requeue(&mut shared.log.borrow_mut());
            (requests.unanswered(), requests.answered() > answered)
        };
        if shared.is_closing.get() {
            return;
        }
        tracing::warn!(
            event = "upstream-lost", export = %shared.name, unanswered, %why,
            "the connection is lost; reconnecting"
        );
        let now = shared.on.now();
        let has_failed = connected_at.since(outage.start) >= limit;
        let is_short = now.since(connected_at) < limit;
        if is_answered {
            outage = Outage::new(now);
        } else if !(had_waiting || has_failed && is_short) {
            // The connection may have been idle for hours: no request has waited since the outage began.
            outage.start = now;
        }
        match reconnect(&shared, &mut outage).await {
            Some(again) => connection = again,
            None => return,
        }
    }
}

/// Carries requests until the connection breaks (returns the reason) or the device is closed (`None`).
async fn run_connection(shared: &Shared, connection: Connection) -> Option<ConnectionLoss> {
    let Connection { stream, input, export } = connection;
    let receiving = async { Some(Receiver::new(shared, input, export).receive().await) };
    let sending = async { transmit(shared, &stream, export).await.err() };
    let watching = async { Some(detect_stall(shared).await) };
    let why = first_of(receiving, first_of(sending, watching)).await;
    stream.shutdown();
    why
}

/// Returns when requests are on the wire and no byte was transferred for too long.
async fn detect_stall(shared: &Shared) -> ConnectionLoss {
    let limit = shared.options.request_timeout;
    loop {
        let busy = || shared.requests.borrow().on_wire() > 0;
        shared.changed.until(|| busy().then_some(())).await;
        let deadline = shared.last_activity.get().after(limit);
        shared.on.sleep_until(deadline).await;
        let idle = shared.on.now().since(shared.last_activity.get());
        if busy() && idle >= limit {
            return ConnectionLoss::Stalled(limit);
        }
    }
}

/// Returns a new connection on which all changes that the server may have lost were replayed; `None` if the device
/// was closed first.
async fn reconnect(shared: &Shared, outage: &mut Outage) -> Option<Connection> {
    let deadline = outage.start.after(shared.options.reconnect);
    let closed = async {
        let closing = || shared.is_closing.get().then_some(());
        shared.changed.until(closing).await;
        None
    };
    let on_timeout = async {
        shared.on.sleep_until(deadline).await;
        fail_requests(shared);
        std::future::pending().await
    };
    let attempts = async { Some(retry_until_connected(shared, &mut outage.retry_delay).await) };
    first_of(attempts, first_of(on_timeout, closed)).await
}

/// Fails all requests until there is a connection again.
fn fail_requests(shared: &Shared) {
    tracing::error!(
        event = "upstream-unreachable", export = %shared.name, after = ?shared.options.reconnect,
        "the server does not answer requests: they fail from now on, and reconnection attempts continue"
    );
    shared.is_unreachable.set(true);
    shared.requests.borrow_mut().fail_queued(Failure::Unreachable);
}

async fn retry_until_connected(shared: &Shared, retry_delay: &mut Duration) -> Connection {
    let mut last_error = String::new();
    loop {
        shared.on.sleep(*retry_delay).await;
        *retry_delay = (*retry_delay * 2).clamp(RETRY_DELAY_MIN, RETRY_DELAY_MAX);
        match try_reconnect(shared).await {
            Ok(connection) => return connection,
            Err(error) => {
                let error = error.to_string();
                if error == last_error {
                    tracing::debug!(export = %shared.name, error, "cannot reconnect");
                } else {
                    tracing::warn!(
                        event = "upstream-retry", export = %shared.name, error,
                        "cannot reconnect; retrying"
                    );
                    last_error = error;
                }
            }
        }
    }
}

async fn try_reconnect(shared: &Shared) -> Result<Connection, ConnectError> {
    let limit = shared.options.handshake_timeout;
    let tls = shared.load_tls()?;
    let mut connection = connect(&shared.on, &shared.uri, tls.as_ref(), limit).await?;
    connection.export.check_replaces(&shared.export.get()).map_err(ConnectError::Changed)?;
    let replayed = replay(shared, &mut connection).await.map_err(ConnectError::Replay)?;
    tracing::info!(event = "upstream-reconnected", export = %shared.name, replayed, "reconnected");
    shared.replayed.set(shared.replayed.get() + replayed as u64);
    if replayed > 0 {
        // A server that dies often must not receive the same changes every time.
        shared.requests.borrow_mut().start_log_flush();
    }
    shared.adopt_connection(&connection.export);
    Ok(connection)
}

/// Replays the changes in the log, in order, and returns their number. Changes that do not overlap are sent together.
async fn replay(shared: &Shared, connection: &mut Connection) -> Result<usize, ConnectionLoss> {
    let entries: Vec<_> = shared.log.borrow().entries().collect();
    let mut in_flight: VecDeque<(u64, ByteRange)> = VecDeque::new();
    for (index, (entry, start)) in entries.iter().enumerate() {
        let conflicts = |in_flight: &VecDeque<(u64, ByteRange)>| {
            let overlaps = |(_, range): &(u64, ByteRange)| range.overlaps(entry.range);
            in_flight.len() >= REPLAY_WINDOW || in_flight.iter().any(overlaps)
        };
        while conflicts(&in_flight) {
            with_request_timeout(shared, replay_reply(connection, &mut in_flight)).await?;
        }
        let message = replay_message(shared, connection, index as u64, entry, *start);
        with_request_timeout(shared, async { Ok(connection.stream.write_all(&message).await?) }).await?;
        in_flight.push_back((index as u64, entry.range));
    }
    while !in_flight.is_empty() {
        with_request_timeout(shared, replay_reply(connection, &mut in_flight)).await?;
    }
    Ok(entries.len())
}

async fn with_request_timeout<T>(
    shared: &Shared,
    step: impl Future<Output = Result<T, ConnectionLoss>>,
) -> Result<T, ConnectionLoss> {
    let limit = shared.options.request_timeout;
    shared.on.timeout(limit, step).await.unwrap_or(Err(ConnectionLoss::Stalled(limit)))
}

fn replay_message(shared: &Shared, connection: &Connection, cookie: u64, entry: &Entry, start: usize) -> Vec<u8> {
    let mut message = Vec::new();
    RequestHeader {
        flags: CommandFlags::NONE,
        command: entry.command.code(),
        cookie,
        offset: entry.range.start.get(),
        len: entry.range.len.get(),
    }
    .push(connection.export.framing, &mut message);
    shared.log.borrow().copy_data(entry, start, &mut message);
    message
}

/// Receives one reply to a replayed change.
async fn replay_reply(
    connection: &mut Connection,
    in_flight: &mut VecDeque<(u64, ByteRange)>,
) -> Result<(), ConnectionLoss> {
    let input = &mut connection.input;
    let header = read_header(input, connection.export.framing).await?;
    let (cookie, error, text, done) = match header {
        ReplyHeader::Simple { error, cookie } => (cookie, error, String::new(), true),
        ReplyHeader::Chunk { done, kind, cookie, len, .. } if kind & chunks::ERROR_BIT != 0 => {
            let error = read_error_chunk(input, len).await?;
            (cookie, error.error.max(1), error.text, done)
        }
        ReplyHeader::Chunk { done: true, kind: chunks::NONE, cookie, len: 0, .. } => (cookie, 0, String::new(), true),
        ReplyHeader::Chunk { kind, len, cookie, .. } => {
            return Err(ConnectionLoss::UnexpectedReply {
                got: format!("chunk of type {kind} with {len} bytes"),
                command: "replayed change",
                offset: cookie,
                len: 0,
            });
        }
    };
    if error == errors::ESHUTDOWN {
        return Err(ConnectionLoss::ShuttingDown);
    }
    if error != 0 {
        return Err(ConnectionLoss::ReplayFailed { error, text });
    }
    let position = in_flight.iter().position(|(known, _)| *known == cookie);
    match position {
        Some(place) if done => {
            in_flight.remove(place);
            Ok(())
        }
        Some(_) => Ok(()),
        None => Err(ConnectionLoss::UnknownCookie(cookie)),
    }
}

impl Shared {
    /// Records that a byte was transferred.
    pub(super) fn touch(&self) {
        self.last_activity.set(self.on.now());
    }

    /// Adopts a new connection, whose export can replace the old one.
    fn adopt_connection(&self, export: &super::connect::Export) {
        let previous = self.export.replace(*export);
        self.is_unreachable.set(false);
        self.touch();
        increment(&self.connections);
        if export.size == previous.size {
            return;
        }
        let mut geometry = self.geometry.get();
        geometry.size = super::visible_size(export.size, geometry.block_size);
        if geometry.size == self.geometry.get().size {
            return;
        }
        tracing::info!(
            event = "size-changed", export = %self.name,
            from = %ByteLen::new(previous.size), to = %ByteLen::new(export.size),
            "the size of the export has changed"
        );
        self.geometry.set(geometry);
        self.changes.announce_size(geometry.size);
    }
}

fn increment(counter: &Cell<u64>) {
    counter.set(counter.get() + 1);
}
