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
use tracing::Span;

use super::Shared;
use super::admission::{Member, NoSlot};
use super::buffers::buffer_bytes;
use super::handshake::{Handshake, NegotiatedOptions};
use super::limits::Limits;
use super::reply::Outgoing;
use super::serve::{CACHE_STEP_BYTES, Refused, check, execute, refuse, reply_bytes_max};

/// Client in the transmission phase.
pub(super) struct Connection {
    pub(super) shared: Rc<Shared>,
    pub(super) negotiated: NegotiatedOptions,
    pub(super) outgoing: Outgoing,
    limits: Rc<Limits>,
    pub(super) member: Rc<Member>,
}

/// Reason why a connection ended.
#[derive(Debug, thiserror::Error)]
enum ConnectionEnd {
    #[error("the client disconnected")]
    Disconnected,
    #[error("the server is stopping")]
    Stopping,
    #[error("the connection broke: {0}")]
    Io(#[from] io::Error),
    #[error("the client violates the protocol: {0}")]
    Malformed(#[from] Malformed),
    #[error("the client sent a payload of {0} bytes; {PAYLOAD_LEN_MAX} are allowed")]
    PayloadTooLong(u64),
    #[error("the client was idle, or its host had the most clients, and another client needed its slot")]
    Evicted,
    #[error("all slots are taken by active clients")]
    NoSlot,
    #[error("the client has kept the server waiting for {0:?}, with memory that other clients wait for")]
    Stalled(Duration),
}

/// Serves a connected client until it or the server ends. `span` names the client in messages.
pub(super) async fn serve(shared: Rc<Shared>, socket: Socket, member: &Rc<Member>, span: &Span) {
    tracing::debug!(parent: span, "an NBD client has connected");
    let stream = Rc::new(MaybeTlsStream::plain(socket));
    let mut input = StreamReader::new(Rc::clone(&stream));
    let evicted = shared.changed.until(|| member.is_evicted().then_some(None));
    if let Some(negotiated) = first_of(run_handshake(&shared, &stream, &mut input, span), evicted).await {
        serve_transmission(&shared, negotiated, &stream, input, member, span).await;
    }
    stream.shutdown();
}

async fn run_handshake(
    shared: &Rc<Shared>,
    stream: &Rc<MaybeTlsStream>,
    input: &mut StreamReader,
    span: &Span,
) -> Option<NegotiatedOptions> {
    let limit = shared.options.handshake_timeout;
    let handshake = shared.on.timeout(limit, Handshake::new(shared, stream, input).run());
    let stopped = async {
        shared.until_stopping().await;
        Some(Ok(None))
    };
    match first_of(handshake, stopped).await {
        Some(Ok(negotiated)) => negotiated,
        Some(Err(error)) => {
            tracing::info!(
                parent: span, event = "nbd-refused", export = shared.options.export, %error,
                "an NBD client was refused in the handshake"
            );
            None
        }
        None => {
            tracing::info!(
                parent: span,
                event = "nbd-refused",
                export = shared.options.export,
                ?limit,
                "an NBD client did not finish the handshake"
            );
            None
        }
    }
}

async fn serve_transmission(
    shared: &Rc<Shared>,
    negotiated: NegotiatedOptions,
    stream: &Rc<MaybeTlsStream>,
    input: StreamReader,
    member: &Rc<Member>,
    span: &Span,
) {
    tracing::debug!(
        parent: span,
        event = "nbd-connected",
        export = shared.options.export,
        ?negotiated,
        "an NBD client has finished the handshake"
    );
    shared.counters.negotiated(negotiated.framing);
    let options = &shared.options;
    let connection = Rc::new(Connection {
        shared: Rc::clone(shared),
        negotiated,
        outgoing: Outgoing::default(),
        limits: Limits::new(options.requests_max, options.buffer_len_max.as_usize(), &shared.memory),
        member: Rc::clone(member),
    });
    member.set_limits(&connection.limits);
    let receiving = async {
        let ended = first_of(connection.receive(input), connection.until_stopped()).await;
        if let ConnectionEnd::Disconnected | ConnectionEnd::Stopping = ended {
            // Spec, "Terminating the transmission phase": requests in flight are answered first.
            connection.limits.until_idle().await;
        }
        ended
    };
    let sending = async { ConnectionEnd::Io(connection.outgoing.send_all(stream, &connection.limits).await) };
    let aborted = shared.changed.until(|| match () {
        () if shared.aborted.get() => Some(ConnectionEnd::Stopping),
        () if member.is_evicted() => Some(ConnectionEnd::Evicted),
        () if connection.limits.has_timed_out() => Some(ConnectionEnd::Stalled(options.stall_timeout)),
        () => None,
    });
    let reason = first_of(receiving, first_of(sending, aborted)).await;
    connection.outgoing.close();
    match reason {
        ConnectionEnd::Disconnected | ConnectionEnd::Stopping => {
            tracing::debug!(
                parent: span, event = "nbd-disconnected", export = shared.options.export, %reason,
                "an NBD client was disconnected"
            );
        }
        reason => tracing::info!(
            parent: span, event = "nbd-disconnected", export = shared.options.export, %reason,
            "an NBD client was disconnected"
        ),
    }
}

impl Connection {
    /// Completes when the server is to stop and this connection has no request in flight.
    async fn until_stopped(&self) -> ConnectionEnd {
        self.shared.until_stopping().await;
        self.limits.until_idle().await;
        ConnectionEnd::Stopping
    }

    /// Receives requests until the client disconnects or violates the protocol; returns the reason.
    async fn receive(self: &Rc<Self>, mut input: StreamReader) -> ConnectionEnd {
        let pool = TaskPool::new(&self.shared.on);
        loop {
            let (request, incoming) = match self.receive_request(&mut input).await {
                Ok(Some(taken)) => taken,
                Ok(None) => return ConnectionEnd::Disconnected,
                Err(ended) => return ended,
            };
            match incoming {
                IncomingRequest::Refused(refused, permit) => {
                    self.outgoing.push(refuse(self, &request, &refused, permit));
                }
                IncomingRequest::Execute(command, buffer, permit) => {
                    // There are at most as many tasks as permits.
                    pool.start(|| execute(Rc::clone(self), request, command, buffer, permit));
                }
            }
        }
    }

    /// Reads the next request with its payload; returns `None` if the client sent a disconnect request.
    async fn receive_request(
        &self,
        input: &mut StreamReader,
    ) -> Result<Option<(RequestHeader, IncomingRequest)>, ConnectionEnd> {
        let framing = self.negotiated.framing;
        let header_len = framing.request_header_len();
        const { assert!(REQUEST_HEADER_LEN_MAX <= 64) };
        let request = RequestHeader::parse(framing, input.peek(header_len).await?)?;
        input.consume(header_len);
        if request.command == Command::Disconnect.code() {
            return Ok(None);
        }
        let payload_len = request.payload_len(framing);
        if payload_len > u64::from(PAYLOAD_LEN_MAX) {
            return Err(ConnectionEnd::PayloadTooLong(payload_len));
        }
        self.shared.counters.request();
        match self.shared.admission.request(&self.member, self.shared.on.turn_time()) {
            Ok(room) => self.shared.wake_evicted(room),
            Err(NoSlot) => return Err(ConnectionEnd::NoSlot),
        }
        let checked = if self.shared.stopping.get() { Err(Refused(errors::ESHUTDOWN)) } else { check(self, &request) };
        let command = match checked {
            Ok(command) => command,
            Err(refused) => {
                let permit = self.limits.permit(0).await;
                input.skip(payload_len).await?;
                return Ok(Some((request, IncomingRequest::Refused(refused, permit))));
            }
        };
        let buffer_len = match command {
            Command::Read | Command::Write => request.len as usize,
            Command::Cache => request.len.min(CACHE_STEP_BYTES) as usize,
            _ => 0,
        };
        if buffer_len == 0 {
            let permit = self.limits.permit(reply_bytes_max(command)).await;
            return Ok(Some((request, IncomingRequest::Execute(command, None, permit))));
        }
        let permit = self.limits.permit(buffer_bytes(buffer_len)).await;
        let mut buffer = self.shared.buffers.take(buffer_len);
        if command == Command::Write {
            self.receive_payload(input, &mut buffer).await?;
        }
        Ok(Some((request, IncomingRequest::Execute(command, Some(buffer), permit))))
    }

    async fn receive_payload(&self, input: &mut StreamReader, into: &mut [u8]) -> io::Result<()> {
        let into = ReadBuf::new(into);
        let mut done = 0;
        while done < into.len() {
            match input.try_payload(into.skip(done))? {
                0 => self.limits.wait_for_client(input.readable()).await?,
                moved => done += moved,
            }
        }
        Ok(())
    }
}

/// Request that has been read.
enum IncomingRequest {
    Execute(Command, Option<super::buffers::Buffer>, super::limits::Permit),
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
            shared.memory.time_out_stalled(&stalled);
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
