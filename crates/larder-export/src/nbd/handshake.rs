//! Handshake of a connection: flags, TLS, and options until the client enters the transmission phase.

use std::io;
use std::rc::Rc;

use larder_block::nbd::handshake::{
    self, BlockSizes, EXPORT_NAME_PADDING, ExportInfo, ExportRequest, FIXED_NEWSTYLE, MetaContextRequest, NO_ZEROES,
    OPTION_HEADER_LEN, OptionHeader, infos, options, push_option_reply, replies,
};
use larder_block::nbd::transmission::Framing;
use larder_block::nbd::{BASE_ALLOCATION, Malformed, PAYLOAD_LEN_MAX, STRING_LEN_MAX, StreamReader, TransmissionFlags};
use larder_block::printable;
use larder_block::tls::{MaybeTlsStream, TlsError};

use super::Shared;

/// Longest data of an option that is read, in bytes: far more than real clients send.
const OPTION_LEN_MAX: u32 = 64 << 10;

/// Identifier of `base:allocation`, the only metadata context of this server.
pub(super) const ALLOCATION_CONTEXT: u32 = 1;

/// Result of the negotiation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NegotiatedOptions {
    pub(super) framing: Framing,
    /// True if the client may query block status.
    pub(super) allocation: bool,
}

/// Reason why a client did not reach the transmission phase.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    #[error("the client disconnected during the handshake: {0}")]
    Io(#[from] io::Error),
    #[error("the client violates the protocol: {0}")]
    Malformed(#[from] Malformed),
    #[error("the client's flags {0:#x} are not among those offered")]
    Flags(u32),
    #[error("{0}")]
    Tls(#[from] TlsError),
    #[error("the client sent {0} bytes unencrypted where TLS had to begin")]
    UnencryptedData(usize),
    #[error("the client sent {name} of {len} bytes; {OPTION_LEN_MAX} are allowed")]
    LongOption { name: &'static str, len: u32 },
    #[error(
        "the client requested export '{0}', which does not exist, by NBD_OPT_EXPORT_NAME, which has no error reply"
    )]
    UnknownExport(String),
    #[error("the client requested the export without TLS, by NBD_OPT_EXPORT_NAME, which has no error reply")]
    TlsRequired,
}

/// Step that follows an option.
enum Step {
    /// Another option.
    Next,
    /// The transmission phase.
    Transmission,
    /// The end, because the client sent ABORT.
    Aborted,
}

pub(super) struct Handshake<'a> {
    shared: &'a Shared,
    stream: &'a Rc<MaybeTlsStream>,
    input: &'a mut StreamReader,
    fixed: bool,
    no_zeroes: bool,
    framing: Framing,
    allocation: bool,
    answer: Vec<u8>,
}

impl<'a> Handshake<'a> {
    pub(super) fn new(shared: &'a Shared, stream: &'a Rc<MaybeTlsStream>, input: &'a mut StreamReader) -> Self {
        Self {
            shared,
            stream,
            input,
            fixed: false,
            no_zeroes: false,
            framing: Framing::Simple,
            allocation: false,
            answer: Vec::new(),
        }
    }

    /// Runs the handshake; returns `None` if the client ended it without entering the transmission phase.
    pub(super) async fn run(mut self) -> Result<Option<NegotiatedOptions>, HandshakeError> {
        self.greet().await?;
        loop {
            let header = OptionHeader::parse(&self.input.take::<OPTION_HEADER_LEN>().await?)?;
            let step = self.handle_option(header).await?;
            let answer = std::mem::take(&mut self.answer);
            self.stream.write_all(&answer).await?;
            match step {
                Step::Next => {}
                Step::Aborted => return Ok(None),
                Step::Transmission => {
                    return Ok(Some(NegotiatedOptions { framing: self.framing, allocation: self.allocation }));
                }
            }
        }
    }

    async fn greet(&mut self) -> Result<(), HandshakeError> {
        let offered = FIXED_NEWSTYLE | NO_ZEROES;
        self.stream.write_all(&handshake::encode_greeting(offered)).await?;
        let flags = u32::from_be_bytes(self.input.take().await?);
        if flags & !u32::from(offered) != 0 {
            return Err(HandshakeError::Flags(flags));
        }
        self.fixed = flags & u32::from(FIXED_NEWSTYLE) != 0;
        self.no_zeroes = flags & u32::from(NO_ZEROES) != 0;
        Ok(())
    }

    async fn handle_option(&mut self, header: OptionHeader) -> Result<Step, HandshakeError> {
        if header.len > OPTION_LEN_MAX {
            return Err(HandshakeError::LongOption { name: handshake::option_name(header.option), len: header.len });
        }
        let mut data = vec![0; header.len as usize];
        self.input.read_exact(&mut data).await?;
        let option = header.option;
        let needs_tls = self.shared.options.tls.is_some() && !self.stream.is_encrypted();
        match option {
            // A client without fixed newstyle receives no replies, and knows no other option.
            options::EXPORT_NAME => return self.handle_export_name(&data, needs_tls),
            options::ABORT => {
                self.reply(option, replies::ACK, &[]);
                return Ok(Step::Aborted);
            }
            options::STARTTLS => return self.start_tls(&data).await,
            _ if needs_tls => self.refuse(option, replies::ERR_TLS_REQD, "TLS is required here"),
            options::LIST | options::STRUCTURED_REPLY | options::EXTENDED_HEADERS if !data.is_empty() => {
                self.refuse(option, replies::ERR_INVALID, "this option has no data");
            }
            options::LIST => {
                let shared = &self.shared.options;
                let data = handshake::encode_server(&shared.export, &shared.description);
                self.reply(option, replies::SERVER, &data);
                self.reply(option, replies::ACK, &[]);
            }
            options::STRUCTURED_REPLY if self.framing == Framing::Extended => {
                let text = "extended headers are in use already";
                self.refuse(option, replies::ERR_EXT_HEADER_REQD, text);
            }
            options::STRUCTURED_REPLY => {
                self.framing = Framing::Structured;
                self.reply(option, replies::ACK, &[]);
            }
            options::EXTENDED_HEADERS => {
                self.framing = Framing::Extended;
                self.reply(option, replies::ACK, &[]);
            }
            options::INFO | options::GO => return Ok(self.handle_export(option, &data)),
            options::LIST_META_CONTEXT | options::SET_META_CONTEXT => {
                self.handle_meta_context(option, &data);
            }
            _ => self.refuse(option, replies::ERR_UNSUP, "unknown option"),
        }
        Ok(Step::Next)
    }

    fn reply(&mut self, option: u32, kind: u32, data: &[u8]) {
        push_option_reply(&mut self.answer, option, kind, data);
    }

    fn refuse(&mut self, option: u32, kind: u32, text: &str) {
        self.reply(option, kind, text.as_bytes());
    }

    fn handle_export_name(&mut self, data: &[u8], needs_tls: bool) -> Result<Step, HandshakeError> {
        if needs_tls {
            return Err(HandshakeError::TlsRequired);
        }
        let name = String::from_utf8_lossy(data);
        if data.len() > STRING_LEN_MAX || !self.shared.is_export(&name) {
            return Err(HandshakeError::UnknownExport(printable(&name)));
        }
        let (size, flags) = self.size_and_flags();
        self.answer.extend(size.to_be_bytes());
        self.answer.extend(flags.0.to_be_bytes());
        if !self.no_zeroes {
            self.answer.extend([0; EXPORT_NAME_PADDING]);
        }
        Ok(Step::Transmission)
    }

    async fn start_tls(&mut self, data: &[u8]) -> Result<Step, HandshakeError> {
        let option = options::STARTTLS;
        let tls = match &self.shared.options.tls {
            Some(tls) if self.fixed && data.is_empty() && !self.stream.is_encrypted() => tls,
            Some(_) => {
                self.refuse(
                    option,
                    replies::ERR_INVALID,
                    "STARTTLS has data, is not the first one, or comes without fixed newstyle",
                );
                return Ok(Step::Next);
            }
            None => {
                self.refuse(option, replies::ERR_POLICY, "no certificate is configured");
                return Ok(Step::Next);
            }
        };
        // Unencrypted data after the option must not be treated as sent under TLS.
        if !self.input.buffered().is_empty() {
            return Err(HandshakeError::UnencryptedData(self.input.buffered().len()));
        }
        self.reply(option, replies::ACK, &[]);
        let answer = std::mem::take(&mut self.answer);
        self.stream.write_all(&answer).await?;
        self.stream.start_server(tls).await?;
        // Spec, "NBD_OPT_STARTTLS": nothing negotiated before remains valid.
        self.framing = Framing::Simple;
        self.allocation = false;
        Ok(Step::Next)
    }

    /// Answers the options INFO and GO.
    fn handle_export(&mut self, option: u32, data: &[u8]) -> Step {
        let request = match ExportRequest::parse(data) {
            Ok(request) => request,
            Err(error) => {
                self.refuse(option, replies::ERR_INVALID, &error.to_string());
                return Step::Next;
            }
        };
        if self.shared.stopping.get() {
            self.refuse(option, replies::ERR_SHUTDOWN, "the server is shutting down");
            return Step::Next;
        }
        if !self.shared.is_export(request.name) {
            let text = format!("there is no export '{}' here", printable(request.name));
            self.refuse(option, replies::ERR_UNKNOWN, &text);
            return Step::Next;
        }
        let (size, flags) = self.size_and_flags();
        let shared = self.shared;
        let mut sent_infos = vec![ExportInfo::Export { size, flags }];
        if request.requests(infos::NAME) {
            sent_infos.push(ExportInfo::Name(&shared.options.export));
        }
        if request.requests(infos::DESCRIPTION) && !shared.options.description.is_empty() {
            sent_infos.push(ExportInfo::Description(&shared.options.description));
        }
        // Sent to every client: one that did not request it may still respect it.
        sent_infos.push(ExportInfo::BlockSize(self.block_sizes()));
        for info in sent_infos {
            self.reply(option, replies::INFO, &info.encode());
        }
        self.reply(option, replies::ACK, &[]);
        match option {
            options::GO => Step::Transmission,
            _ => Step::Next,
        }
    }

    fn handle_meta_context(&mut self, option: u32, data: &[u8]) {
        let selects = option == options::SET_META_CONTEXT;
        if selects {
            // Spec: the previous selection is void, whatever the result of this option.
            self.allocation = false;
        }
        if self.framing == Framing::Simple {
            let text = "negotiate structured replies or extended headers first";
            return self.refuse(option, replies::ERR_INVALID, text);
        }
        let request = match MetaContextRequest::parse(data) {
            Ok(request) => request,
            Err(error) => return self.refuse(option, replies::ERR_INVALID, &error.to_string()),
        };
        if !self.shared.is_export(request.name) {
            return self.refuse(option, replies::ERR_UNKNOWN, "there is no such export here");
        }
        let matches = |query: &&str| *query == BASE_ALLOCATION || (!selects && *query == "base:");
        let found = request.queries.iter().any(matches);
        if found || (!selects && request.queries.is_empty()) {
            // Spec: in a list the identifier has no meaning and is 0.
            let id = if selects { ALLOCATION_CONTEXT } else { 0 };
            let data = handshake::encode_meta_context(id, BASE_ALLOCATION);
            self.reply(option, replies::META_CONTEXT, &data);
            self.allocation |= selects;
        }
        self.reply(option, replies::ACK, &[]);
    }

    fn size_and_flags(&self) -> (u64, TransmissionFlags) {
        let geometry = self.shared.device.geometry();
        // Flushes and discards that a device lacks succeed without effect, so every command is offered.
        let flags = TransmissionFlags::HAS_FLAGS
            .with(TransmissionFlags::FLUSH)
            .with(TransmissionFlags::FUA)
            .with(TransmissionFlags::CACHE)
            // All connections share one device on one loop, so a flush covers the writes of all of them.
            .with(TransmissionFlags::CAN_MULTI_CONN)
            .with_if(self.framing != Framing::Simple, TransmissionFlags::DF);
        let flags = if self.shared.is_read_only() {
            flags.with(TransmissionFlags::READ_ONLY)
        } else {
            flags
                .with(TransmissionFlags::WRITE_ZEROES)
                .with(TransmissionFlags::FAST_ZERO)
                .with_if(geometry.discard_granularity > 0, TransmissionFlags::TRIM)
        };
        (geometry.size.get(), flags)
    }

    fn block_sizes(&self) -> BlockSizes {
        let geometry = self.shared.device.geometry();
        BlockSizes {
            // Spec, "Size constraints": at most 64 KiB; no device has more.
            minimum: geometry.block_size.min(65536),
            preferred: geometry.physical_block_size.max(geometry.block_size).max(4096),
            payload_max: PAYLOAD_LEN_MAX,
        }
    }
}
