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
use super::error::{Broken, ConnectError};
use super::log::Entry;
use super::receive::{Receiver, read_error_chunk, read_header};
use super::transmit::transmit;
use crate::error::Failure;
use crate::event_loop::LoopTime;
use crate::nbd::CommandFlags;
use crate::nbd::flags::errors;
use crate::nbd::transmission::{ReplyHeader, Request, chunks};
use crate::signal::first_of;
use crate::units::{ByteLen, ByteRange};

/// The pause before the second attempt to reconnect in an outage. It doubles with each attempt, up to [`PAUSE_MAX`].
const PAUSE_FIRST: Duration = Duration::from_millis(10);

/// The maximum pause between attempts to reconnect.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// The maximum number of changes that are replayed at the same time.
const REPLAY_WINDOW: usize = 32;

/// A time without a working connection: from a lost connection until the server answers a request. A handshake does
/// not end it, because a server may complete every handshake and break the protocol afterwards.
struct Outage {
    /// The start of the time after which requests fail.
    start: LoopTime,
    /// The pause before the next attempt to reconnect.
    pause: Duration,
}

impl Outage {
    fn begin(start: LoopTime) -> Self {
        let pause = Duration::ZERO;
        Self { start, pause }
    }
}

/// Keeps the export connected until the device is closed.
pub(super) async fn run(shared: Rc<Shared>, first: Connection) {
    let limit = shared.options.reconnect;
    let mut connection = first;
    let mut outage = Outage::begin(shared.on.now());
    loop {
        let connected = shared.on.now();
        let (answered, waiting) = {
            let requests = shared.requests.borrow();
            (requests.answered(), requests.unanswered() > 0)
        };
        let why = carry(&shared, connection).await;
        let Some(why) = why else { return };
        let (unanswered, is_answered) = {
            let mut requests = shared.requests.borrow_mut();
            requests.requeue(&mut shared.log.borrow_mut());
            (requests.unanswered(), requests.answered() > answered)
        };
        if shared.closing.get() {
            return;
        }
        tracing::warn!(export = %shared.name, unanswered, %why, "the connection is lost; reconnecting");
        let now = shared.on.now();
        let has_failed = connected.since(outage.start) >= limit;
        let is_short = now.since(connected) < limit;
        if is_answered {
            outage = Outage::begin(now);
        } else if !(waiting || has_failed && is_short) {
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
async fn carry(shared: &Shared, connection: Connection) -> Option<Broken> {
    let Connection { stream, input, export } = connection;
    let receiving = async { Some(Receiver::new(shared, input, export).receive().await) };
    let sending = async { transmit(shared, &stream, export).await.err() };
    let watching = async { Some(watch(shared).await) };
    let why = first_of(receiving, first_of(sending, watching)).await;
    stream.shutdown();
    why
}

/// Returns when requests are on the wire and no byte was transferred for too long.
async fn watch(shared: &Shared) -> Broken {
    let limit = shared.options.request_timeout;
    loop {
        let busy = || shared.requests.borrow().on_wire() > 0;
        shared.changed.until(|| busy().then_some(())).await;
        let deadline = shared.last_activity.get().after(limit);
        shared.on.sleep_until(deadline).await;
        let idle = shared.on.now().since(shared.last_activity.get());
        if busy() && idle >= limit {
            return Broken::Stalled(limit);
        }
    }
}

/// Returns a new connection on which all changes that the server may have lost were replayed; `None` if the device
/// was closed first.
async fn reconnect(shared: &Shared, outage: &mut Outage) -> Option<Connection> {
    let deadline = outage.start.after(shared.options.reconnect);
    let closed = async {
        let closing = || shared.closing.get().then_some(());
        shared.changed.until(closing).await;
        None
    };
    let given_up = async {
        shared.on.sleep_until(deadline).await;
        give_up(shared);
        std::future::pending().await
    };
    let attempts = async { Some(attempt_for_ever(shared, &mut outage.pause).await) };
    first_of(attempts, first_of(given_up, closed)).await
}

/// Fails all requests until there is a connection again.
fn give_up(shared: &Shared) {
    tracing::error!(
        export = %shared.name, after = ?shared.options.reconnect,
        "the server does not answer requests: they fail from now on, and reconnection attempts continue"
    );
    shared.unreachable.set(true);
    shared.requests.borrow_mut().fail_queued(Failure::Unreachable);
}

async fn attempt_for_ever(shared: &Shared, pause: &mut Duration) -> Connection {
    let mut last_error = String::new();
    loop {
        shared.on.sleep(*pause).await;
        *pause = (*pause * 2).clamp(PAUSE_FIRST, PAUSE_MAX);
        match attempt(shared).await {
            Ok(connection) => return connection,
            Err(error) => {
                let error = error.to_string();
                if error == last_error {
                    tracing::debug!(export = %shared.name, error, "cannot reconnect");
                } else {
                    tracing::warn!(export = %shared.name, error, "cannot reconnect; retrying");
                    last_error = error;
                }
            }
        }
    }
}

async fn attempt(shared: &Shared) -> Result<Connection, ConnectError> {
    let limit = shared.options.handshake_timeout;
    let tls = shared.load_tls()?;
    let mut connection = connect(&shared.on, &shared.uri, tls.as_ref(), limit).await?;
    connection
        .export
        .replaces(&shared.export.get())
        .map_err(ConnectError::Changed)?;
    let replayed = replay(shared, &mut connection).await.map_err(ConnectError::Replay)?;
    tracing::info!(export = %shared.name, replayed, "reconnected");
    shared.replayed.set(shared.replayed.get() + replayed as u64);
    if replayed > 0 {
        // A server that dies often must not receive the same changes every time.
        shared.requests.borrow_mut().start_log_flush();
    }
    shared.connected(&connection.export);
    Ok(connection)
}

/// Replays the changes in the log, in order, and returns their number. Changes that do not overlap are sent together.
async fn replay(shared: &Shared, connection: &mut Connection) -> Result<usize, Broken> {
    let entries: Vec<_> = shared.log.borrow().entries().collect();
    let mut under_way: VecDeque<(u64, ByteRange)> = VecDeque::new();
    for (index, (entry, start)) in entries.iter().enumerate() {
        let conflicts = |under_way: &VecDeque<(u64, ByteRange)>| {
            let overlaps = |(_, range): &(u64, ByteRange)| range.overlaps(entry.range);
            under_way.len() >= REPLAY_WINDOW || under_way.iter().any(overlaps)
        };
        while conflicts(&under_way) {
            patiently(shared, replay_reply(connection, &mut under_way)).await?;
        }
        let message = replay_message(shared, connection, index as u64, entry, *start);
        patiently(shared, async { Ok(connection.stream.write_all(&message).await?) }).await?;
        under_way.push_back((index as u64, entry.range));
    }
    while !under_way.is_empty() {
        patiently(shared, replay_reply(connection, &mut under_way)).await?;
    }
    Ok(entries.len())
}

async fn patiently<T>(shared: &Shared, step: impl Future<Output = Result<T, Broken>>) -> Result<T, Broken> {
    let limit = shared.options.request_timeout;
    shared
        .on
        .timeout(limit, step)
        .await
        .unwrap_or(Err(Broken::Stalled(limit)))
}

fn replay_message(shared: &Shared, connection: &Connection, cookie: u64, entry: &Entry, start: usize) -> Vec<u8> {
    let mut message = Vec::new();
    Request {
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
async fn replay_reply(connection: &mut Connection, under_way: &mut VecDeque<(u64, ByteRange)>) -> Result<(), Broken> {
    let input = &mut connection.input;
    let header = read_header(input, connection.export.framing).await?;
    let (cookie, error, text, done) = match header {
        ReplyHeader::Simple { error, cookie } => (cookie, error, String::new(), true),
        ReplyHeader::Chunk {
            done,
            kind,
            cookie,
            len,
            ..
        } if kind & chunks::ERROR_BIT != 0 => {
            let error = read_error_chunk(input, len).await?;
            (cookie, error.error.max(1), error.text, done)
        }
        ReplyHeader::Chunk {
            done: true,
            kind: chunks::NONE,
            cookie,
            len: 0,
            ..
        } => (cookie, 0, String::new(), true),
        ReplyHeader::Chunk { kind, len, cookie, .. } => {
            return Err(Broken::WrongReply {
                got: format!("chunk of type {kind} with {len} bytes"),
                command: "replayed change",
                offset: cookie,
                len: 0,
            });
        }
    };
    if error == errors::ESHUTDOWN {
        return Err(Broken::ShuttingDown);
    }
    if error != 0 {
        return Err(Broken::ReplayFailed { error, text });
    }
    let place = under_way.iter().position(|(known, _)| *known == cookie);
    match place {
        Some(place) if done => {
            under_way.remove(place);
            Ok(())
        }
        Some(_) => Ok(()),
        None => Err(Broken::UnknownCookie(cookie)),
    }
}

impl Shared {
    /// Records that a byte was transferred.
    pub(super) fn touch(&self) {
        self.last_activity.set(self.on.now());
    }

    /// Adopts a new connection, whose export can replace the old one.
    fn connected(&self, export: &super::connect::Export) {
        let before = self.export.replace(*export);
        self.unreachable.set(false);
        self.touch();
        bump(&self.connections);
        if export.size == before.size {
            return;
        }
        let mut geometry = self.geometry.get();
        geometry.size = super::visible_size(export.size, geometry.block_size);
        if geometry.size == self.geometry.get().size {
            return;
        }
        tracing::info!(
            export = %self.name, from = %ByteLen::new(before.size), to = %ByteLen::new(export.size),
            "the size of the export has changed"
        );
        self.geometry.set(geometry);
        self.changes.announce_size(geometry.size);
    }
}

fn bump(counter: &Cell<u64>) {
    counter.set(counter.get() + 1);
}
