//! Connection of one client: its handshake, then its requests, each in a task of its own, until one side disconnects.

use std::io;
use std::rc::Rc;
use std::time::Duration;

use larder_block::ReadBuf;
use larder_block::event_loop::{Socket, TaskPool};
use larder_block::nbd::flags::errors;
use larder_block::nbd::transmission::{REQUEST_HEADER_LEN_MAX, RequestHeader};
use larder_block::nbd::{Command, Malformed, PAYLOAD_LEN_MAX, StreamReader};
use larder_block::signal::first_of;
use larder_block::tls::MaybeTlsStream;

use super::Shared;
use super::admission::{Member, NoRoom};
use super::buffers::room_of;
use super::handshake::{Agreed, Handshake};
use super::limits::Limits;
use super::reply::Outgoing;
use super::serve::{CACHE_STEP, Refused, check, execute, refuse, reply_room};

/// Client in the transmission phase.
pub(super) struct Connection {
    pub(super) shared: Rc<Shared>,
    pub(super) agreed: Agreed,
    pub(super) outgoing: Outgoing,
    limits: Rc<Limits>,
    pub(super) member: Rc<Member>,
}

/// Reason why a connection ended.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error("the client disconnected")]
    Politely,
    #[error("the server is stopping")]
    Stopping,
    #[error("the connection broke: {0}")]
    Io(#[from] io::Error),
    #[error("the client violates the protocol: {0}")]
    Malformed(#[from] Malformed),
    #[error("the client sent a payload of {0} bytes; {PAYLOAD_LEN_MAX} are allowed")]
    LongPayload(u64),
    #[error("the client was idle, or its host had the most clients, and another client needed its slot")]
    Evicted,
    #[error("all slots are taken by active clients")]
    NoRoom,
    #[error("the client has kept the server waiting for {0:?}, with memory that other clients wait for")]
    GivenUp(Duration),
}

/// Serves a connected client until it or the server ends.
pub(super) async fn serve(shared: Rc<Shared>, socket: Socket, member: &Rc<Member>) {
    let stream = Rc::new(MaybeTlsStream::plain(socket));
    let mut input = StreamReader::new(Rc::clone(&stream));
    let evicted = shared.changed.until(|| member.is_evicted().then_some(None));
    if let Some(agreed) = first_of(shake_hands(&shared, &stream, &mut input), evicted).await {
        transmission(&shared, agreed, &stream, input, member).await;
    }
    stream.shutdown();
}

async fn shake_hands(shared: &Rc<Shared>, stream: &Rc<MaybeTlsStream>, input: &mut StreamReader) -> Option<Agreed> {
    let limit = shared.options.handshake_timeout;
    let handshake = shared.on.timeout(limit, Handshake::new(shared, stream, input).run());
    let stopped = async {
        shared.until_stopping().await;
        Some(Ok(None))
    };
    match first_of(handshake, stopped).await {
        Some(Ok(agreed)) => agreed,
        Some(Err(error)) => {
            tracing::info!(export = shared.options.export, %error, "an NBD client was refused in the handshake");
            None
        }
        None => {
            tracing::info!(
                export = shared.options.export,
                ?limit,
                "an NBD client did not finish the handshake"
            );
            None
        }
    }
}

async fn transmission(
    shared: &Rc<Shared>,
    agreed: Agreed,
    stream: &Rc<MaybeTlsStream>,
    input: StreamReader,
    member: &Rc<Member>,
) {
    tracing::debug!(
        export = shared.options.export,
        ?agreed,
        "an NBD client has finished the handshake"
    );
    shared.counters.agreed(agreed.framing);
    let options = &shared.options;
    let connection = Rc::new(Connection {
        shared: Rc::clone(shared),
        agreed,
        outgoing: Outgoing::default(),
        limits: Limits::new(options.requests_max, options.buffer_len_max.as_usize(), &shared.memory),
        member: Rc::clone(member),
    });
    member.counted_by(&connection.limits);
    let receiving = async {
        let ended = first_of(connection.receive(input), connection.stopped()).await;
        if let Ended::Politely | Ended::Stopping = ended {
            // Spec, "Terminating the transmission phase": requests in flight are answered first.
            connection.limits.idle().await;
        }
        ended
    };
    let sending = async { Ended::Io(connection.outgoing.send_all(stream, &connection.limits).await) };
    let cut = shared.changed.until(|| match () {
        () if shared.cut.get() => Some(Ended::Stopping),
        () if member.is_evicted() => Some(Ended::Evicted),
        () if connection.limits.is_given_up() => Some(Ended::GivenUp(options.stall_timeout)),
        () => None,
    });
    let why = first_of(receiving, first_of(sending, cut)).await;
    connection.outgoing.close();
    match why {
        Ended::Politely | Ended::Stopping => {
            tracing::debug!(export = shared.options.export, %why, "an NBD client was disconnected");
        }
        why => tracing::info!(export = shared.options.export, %why, "an NBD client was disconnected"),
    }
}

impl Connection {
    /// Completes when the server is to stop and this connection has no request in flight.
    async fn stopped(&self) -> Ended {
        self.shared.until_stopping().await;
        self.limits.idle().await;
        Ended::Stopping
    }

    /// Receives requests until the client disconnects or violates the protocol; returns the reason.
    async fn receive(self: &Rc<Self>, mut input: StreamReader) -> Ended {
        let pool = TaskPool::new(&self.shared.on);
        loop {
            let (request, taken) = match self.request(&mut input).await {
                Ok(Some(taken)) => taken,
                Ok(None) => return Ended::Politely,
                Err(ended) => return ended,
            };
            match taken {
                Taken::Refused(refused, permit) => {
                    self.outgoing.push(refuse(self, &request, &refused, permit));
                }
                Taken::Do(command, buffer, permit) => {
                    // There are at most as many tasks as permits.
                    pool.start(|| execute(Rc::clone(self), request, command, buffer, permit));
                }
            }
        }
    }

    /// Reads the next request with its payload; returns `None` if the client sent a disconnect request.
    async fn request(&self, input: &mut StreamReader) -> Result<Option<(RequestHeader, Taken)>, Ended> {
        let framing = self.agreed.framing;
        let header_len = framing.request_header_len();
        const { assert!(REQUEST_HEADER_LEN_MAX <= 64) };
        let request = RequestHeader::parse(framing, input.peek(header_len).await?)?;
        input.consume(header_len);
        if request.command == Command::Disconnect.code() {
            return Ok(None);
        }
        let payload_len = request.payload_len(framing);
        if payload_len > u64::from(PAYLOAD_LEN_MAX) {
            return Err(Ended::LongPayload(payload_len));
        }
        self.shared.counters.request();
        match self.shared.admission.request(&self.member, self.shared.on.turn_time()) {
            Ok(room) => self.shared.wake_victim(room),
            Err(NoRoom) => return Err(Ended::NoRoom),
        }
        let checked = if self.shared.stopping.get() {
            Err(Refused(errors::ESHUTDOWN))
        } else {
            check(self, &request)
        };
        let command = match checked {
            Ok(command) => command,
            Err(refused) => {
                let permit = self.limits.permit(0).await;
                input.skip(payload_len).await?;
                return Ok(Some((request, Taken::Refused(refused, permit))));
            }
        };
        let buffer_len = match command {
            Command::Read | Command::Write => request.len as usize,
            Command::Cache => request.len.min(CACHE_STEP) as usize,
            _ => 0,
        };
        if buffer_len == 0 {
            let permit = self.limits.permit(reply_room(command)).await;
            return Ok(Some((request, Taken::Do(command, None, permit))));
        }
        let permit = self.limits.permit(room_of(buffer_len)).await;
        let mut buffer = self.shared.buffers.take(buffer_len);
        if command == Command::Write {
            self.payload(input, &mut buffer).await?;
        }
        Ok(Some((request, Taken::Do(command, Some(buffer), permit))))
    }

    async fn payload(&self, input: &mut StreamReader, into: &mut [u8]) -> io::Result<()> {
        let into = ReadBuf::new(into);
        let mut done = 0;
        while done < into.len() {
            match input.try_payload(into.skip(done))? {
                0 => self.limits.client(input.readable()).await?,
                moved => done += moved,
            }
        }
        Ok(())
    }
}

/// Request that has been read.
enum Taken {
    Do(Command, Option<super::buffers::Buffer>, super::limits::Permit),
    Refused(Refused, super::limits::Permit),
}

/// Closes, until the server stops, connections of clients that hold memory which others wait for, and do not receive
/// or send.
pub(super) async fn drop_stalled(shared: Rc<Shared>) {
    let watching = async {
        loop {
            shared.memory.queued().await;
            let stalled = shared.memory.stalled();
            shared.on.sleep(shared.options.stall_timeout).await;
            shared.memory.give_up(&stalled);
            shared.changed.raise();
        }
    };
    first_of(watching, shared.until_stopping()).await;
}

/// Accepts connections until the server stops.
pub(super) async fn accept_all(shared: Rc<Shared>, listener: larder_block::event_loop::Listener) {
    loop {
        let accepted = {
            let accepting = async { Some(listener.accept(&shared.on).await) };
            let stopped = async {
                shared.until_stopping().await;
                None
            };
            first_of(accepting, stopped).await
        };
        match accepted {
            None => return,
            Some(Ok(socket)) => shared.admit(socket),
            Some(Err(error)) => {
                tracing::error!(export = shared.options.export, %error, "the NBD socket is broken; no more clients are accepted");
                return;
            }
        }
    }
}
