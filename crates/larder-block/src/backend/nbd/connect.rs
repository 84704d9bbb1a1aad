//! Connection set-up from a URI: connects, starts TLS, and negotiates the options of the handshake.
//!
//! Newstyle servers only. An option that a server does not support costs one more round trip and nothing else:
//! extended headers fall back to structured replies, those to simple ones, and `GO` to `EXPORT_NAME`.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use super::error::{ConnectError, ConnectStep, ExportChange, OptionRefusal};
use crate::event_loop::{Loop, Socket};
use crate::nbd::handshake::{
    self, BlockSizes, EXPORT_NAME_PADDING, ExportInfo, ExportRequest, FIXED_NEWSTYLE, GREETING_LEN, MetaContextRequest,
    NO_ZEROES, OPTION_REPLY_HEADER_LEN, OptionReplyHeader, infos, options, replies,
};
use crate::nbd::transmission::Framing;
use crate::nbd::{BASE_ALLOCATION, Malformed, NbdUri, PAYLOAD_LEN_MAX, StreamReader, TransmissionFlags};
use crate::signal::first_of;
use crate::tls::{ClientTls, MaybeTlsStream};
use crate::units::ByteLen;

/// The maximum length of an option reply that is read, in bytes: a few times the longest string.
const OPTION_REPLY_LEN_MAX: u32 = 16 << 10;

/// The maximum number of replies to one option. Real servers send a handful.
const OPTION_REPLIES_MAX: usize = 64;

/// The properties of an export, as the server reports them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Export {
    /// The exact size in bytes, not necessarily whole blocks.
    pub(super) size: u64,
    pub(super) flags: TransmissionFlags,
    pub(super) sizes: BlockSizes,
    pub(super) framing: Framing,
    /// The ID of the context `base:allocation`, if the server has it.
    pub(super) allocation: Option<u32>,
}

/// A connection that is ready for requests.
pub(super) struct Connection {
    pub(super) stream: Rc<MaybeTlsStream>,
    pub(super) input: StreamReader,
    pub(super) export: Export,
}

/// The waiting time after which the log names the step that a first connection waits for.
const SLOW_STEP_WARNING_AFTER: Duration = Duration::from_secs(2);

/// Connects and completes the handshake within `limit`.
pub(super) async fn connect(
    on: &Loop,
    uri: &NbdUri,
    tls: Option<&ClientTls>,
    limit: Duration,
) -> Result<Connection, ConnectError> {
    connect_within_limit(on, uri, tls, limit, &Cell::new(ConnectStep::Dial)).await
}

/// Connects like [`connect`], and logs the step that it waits for after [`SLOW_STEP_WARNING_AFTER`].
pub(super) async fn connect_with_warning(
    on: &Loop,
    uri: &NbdUri,
    tls: Option<&ClientTls>,
    limit: Duration,
) -> Result<Connection, ConnectError> {
    let step = Cell::new(ConnectStep::Dial);
    let warning = async {
        on.sleep(SLOW_STEP_WARNING_AFTER).await;
        tracing::warn!("{uri}: waiting up to {limit:?} for {}", step.get());
        std::future::pending().await
    };
    first_of(connect_within_limit(on, uri, tls, limit, &step), warning).await
}

async fn connect_within_limit(
    on: &Loop,
    uri: &NbdUri,
    tls: Option<&ClientTls>,
    limit: Duration,
    step: &Cell<ConnectStep>,
) -> Result<Connection, ConnectError> {
    let connected = on.timeout(limit, connect_without_limit(on, uri, tls, step)).await;
    connected.unwrap_or_else(|| Err(ConnectError::Timeout { limit, step: step.get() }))
}

async fn connect_without_limit(
    on: &Loop,
    uri: &NbdUri,
    tls: Option<&ClientTls>,
    step: &Cell<ConnectStep>,
) -> Result<Connection, ConnectError> {
    let socket = Socket::connect(on, &uri.address).await.map_err(ConnectError::Dial)?;
    step.set(ConnectStep::Greeting);
    let stream = Rc::new(MaybeTlsStream::plain(socket));
    let mut handshake = Handshake { input: StreamReader::new(Rc::clone(&stream)), stream, no_zeroes: false };
    let fixed = handshake.greet().await?;
    step.set(ConnectStep::Options);
    if let Some(tls) = tls {
        handshake.start_tls(tls).await?;
    }
    let export =
        if fixed { handshake.negotiate(&uri.export).await? } else { handshake.export_name(&uri.export).await? };
    Ok(Connection { stream: handshake.stream, input: handshake.input, export: export.validated()? })
}

struct Handshake {
    stream: Rc<MaybeTlsStream>,
    input: StreamReader,
    /// The server sends no padding after the reply to `EXPORT_NAME`, by agreement.
    no_zeroes: bool,
}

impl Handshake {
    /// Exchanges flags. Returns true if the server answers options.
    async fn greet(&mut self) -> Result<bool, ConnectError> {
        let greeting = self.input.take::<GREETING_LEN>().await?;
        let flags = handshake::parse_greeting(&greeting).map_err(|error| match error {
            Malformed::Magic { found: handshake::OLDSTYLE_MAGIC, .. } => ConnectError::Oldstyle,
            error => error.into(),
        })?;
        let client_flags = flags & (FIXED_NEWSTYLE | NO_ZEROES);
        self.stream.write_all(&u32::from(client_flags).to_be_bytes()).await?;
        self.no_zeroes = client_flags & NO_ZEROES != 0;
        Ok(client_flags & FIXED_NEWSTYLE != 0)
    }

    async fn start_tls(&mut self, tls: &ClientTls) -> Result<(), ConnectError> {
        self.send_option(options::STARTTLS, &[]).await?;
        match self.read_reply(options::STARTTLS).await? {
            OptionReply::Done => {}
            OptionReply::Refused(refusal) => return Err(ConnectError::TlsRefused(refusal)),
            OptionReply::Data { kind, .. } => return Err(unexpected_reply(options::STARTTLS, kind)),
        }
        // Data that arrived unencrypted after the acknowledgement must not pass for data received under TLS.
        if !self.input.buffered().is_empty() {
            return Err(ConnectError::Injected(self.input.buffered().len()));
        }
        Ok(self.stream.start_client(tls).await?)
    }

    async fn negotiate(&mut self, name: &str) -> Result<Export, ConnectError> {
        let framing = if self.try_option(options::EXTENDED_HEADERS).await? {
            Framing::Extended
        } else if self.try_option(options::STRUCTURED_REPLY).await? {
            Framing::Structured
        } else {
            Framing::Simple
        };
        let allocation = match framing {
            Framing::Simple => None,
            Framing::Structured | Framing::Extended => self.set_meta_context(name).await?,
        };
        let mut export = match self.go(name).await? {
            Some(export) => export,
            None => self.export_name(name).await?,
        };
        export.framing = framing;
        export.allocation = allocation;
        Ok(export)
    }

    /// Requests an option that older servers lack. Returns true if this server supports it.
    async fn try_option(&mut self, option: u32) -> Result<bool, ConnectError> {
        self.send_option(option, &[]).await?;
        match self.read_reply(option).await? {
            OptionReply::Done => Ok(true),
            OptionReply::Refused(refusal) if refusal.kind == replies::ERR_TLS_REQD => Err(ConnectError::TlsRequired),
            OptionReply::Refused(_) => Ok(false),
            OptionReply::Data { kind, .. } => Err(unexpected_reply(option, kind)),
        }
    }

    async fn set_meta_context(&mut self, name: &str) -> Result<Option<u32>, ConnectError> {
        let option = options::SET_META_CONTEXT;
        let request = MetaContextRequest { name, queries: vec![BASE_ALLOCATION] };
        self.send_option(option, &request.encode()).await?;
        let mut allocation_id = None;
        for _ in 0..OPTION_REPLIES_MAX {
            match self.read_reply(option).await? {
                OptionReply::Done => return Ok(allocation_id),
                // The server may refuse because the export is unknown, which `GO` reports better.
                OptionReply::Refused(_) => return Ok(None),
                OptionReply::Data { kind: replies::META_CONTEXT, data } => {
                    let (id, context) = handshake::parse_meta_context(&data)?;
                    if context == BASE_ALLOCATION {
                        allocation_id = Some(id);
                    }
                }
                OptionReply::Data { kind, .. } => return Err(unexpected_reply(option, kind)),
            }
        }
        Err(ConnectError::TooManyReplies { option })
    }

    /// Selects the export by `GO`. Returns `None` if the server is too old for `GO`.
    async fn go(&mut self, name: &str) -> Result<Option<Export>, ConnectError> {
        let option = options::GO;
        let requested = [infos::BLOCK_SIZE, infos::NAME, infos::DESCRIPTION];
        self.send_option(option, &ExportRequest::encode(name, &requested)).await?;
        let mut export = None;
        let mut sizes = BlockSizes::DEFAULT;
        for _ in 0..OPTION_REPLIES_MAX {
            match self.read_reply(option).await? {
                OptionReply::Done => {
                    let (size, flags) = export.ok_or(ConnectError::NoExportSize)?;
                    return Ok(Some(Export::new(size, flags, sizes)));
                }
                OptionReply::Refused(refusal) => {
                    return match refusal.kind {
                        replies::ERR_UNSUP => Ok(None),
                        replies::ERR_TLS_REQD => Err(ConnectError::TlsRequired),
                        _ => Err(ConnectError::Refused(refusal)),
                    };
                }
                OptionReply::Data { kind: replies::INFO, data } => match ExportInfo::parse(&data)? {
                    ExportInfo::Export { size, flags } => export = Some((size, flags)),
                    ExportInfo::BlockSize(reported) => sizes = reported,
                    ExportInfo::Name(name) => tracing::debug!(name, "the server's canonical name of the export"),
                    ExportInfo::Description(text) => tracing::debug!(text, "the export's description"),
                    ExportInfo::Unknown(_) => {}
                },
                OptionReply::Data { kind, .. } => return Err(unexpected_reply(option, kind)),
            }
        }
        Err(ConnectError::TooManyReplies { option })
    }

    /// Selects the export by the old option `EXPORT_NAME`. It cannot report an error: the server closes the
    /// connection.
    async fn export_name(&mut self, name: &str) -> Result<Export, ConnectError> {
        self.send_option(options::EXPORT_NAME, name.as_bytes()).await?;
        let size = u64::from_be_bytes(self.input.take().await?);
        let flags = TransmissionFlags(u16::from_be_bytes(self.input.take().await?));
        if !self.no_zeroes {
            self.input.skip(EXPORT_NAME_PADDING as u64).await?;
        }
        Ok(Export::new(size, flags, BlockSizes::DEFAULT))
    }

    async fn send_option(&self, option: u32, data: &[u8]) -> Result<(), ConnectError> {
        let message = handshake::encode_option(option, data);
        Ok(self.stream.write_all(&message).await?)
    }

    async fn read_reply(&mut self, option: u32) -> Result<OptionReply, ConnectError> {
        let header = self.input.take::<OPTION_REPLY_HEADER_LEN>().await?;
        let header = OptionReplyHeader::parse(&header)?;
        if header.option != option {
            return Err(ConnectError::UnexpectedOption { asked: option, found: header.option });
        }
        if header.len > OPTION_REPLY_LEN_MAX {
            return Err(ConnectError::LongReply { option, len: header.len, allowed: OPTION_REPLY_LEN_MAX });
        }
        let mut data = vec![0; header.len as usize];
        self.input.read_exact(&mut data).await?;
        if header.is_error() {
            return Ok(OptionReply::Refused(OptionRefusal {
                option,
                kind: header.kind,
                text: String::from_utf8_lossy(&data).into_owned(),
            }));
        }
        Ok(match header.kind {
            replies::ACK => OptionReply::Done,
            kind => OptionReply::Data { kind, data },
        })
    }
}

/// A reply to an option.
enum OptionReply {
    Done,
    Refused(OptionRefusal),
    Data { kind: u32, data: Vec<u8> },
}

fn unexpected_reply(option: u32, kind: u32) -> ConnectError {
    ConnectError::UnexpectedReply { option, kind }
}

/// The flags that a reconnected export must still have if it had them before: in-flight requests may need them.
const REQUIRED_FLAGS: TransmissionFlags = TransmissionFlags::FLUSH
    .with(TransmissionFlags::FUA)
    .with(TransmissionFlags::TRIM)
    .with(TransmissionFlags::WRITE_ZEROES)
    .with(TransmissionFlags::FAST_ZERO);

/// The maximum size of an export, in bytes: an offset has 63 bits, and a disk has whole sectors.
const EXPORT_SIZE_MAX: u64 = (1 << 63) - 512;

impl Export {
    fn new(size: u64, flags: TransmissionFlags, sizes: BlockSizes) -> Self {
        Self { size, flags, sizes, framing: Framing::Simple, allocation: None }
    }

    /// Refuses invalid sizes, and caps the payload at the maximum that this client sends.
    fn validated(mut self) -> Result<Self, ConnectError> {
        let BlockSizes { minimum, preferred, payload_max } = self.sizes;
        if self.size == 0 {
            return Err(ConnectError::Empty);
        }
        if self.size > EXPORT_SIZE_MAX {
            return Err(ConnectError::SizeTooLarge(self.size));
        }
        // Spec, "Size constraints": a power of two up to 64 KiB. A very large maximum payload means no limit.
        let valid = minimum.is_power_of_two()
            && minimum <= 65536
            && preferred.is_power_of_two()
            && preferred >= minimum
            && payload_max >= minimum
            && payload_max >= 512;
        if !valid {
            return Err(ConnectError::BlockSizes { minimum, preferred, payload_max });
        }
        self.sizes.payload_max = payload_max.min(PAYLOAD_LEN_MAX);
        Ok(self)
    }

    pub(super) fn has(&self, flag: TransmissionFlags) -> bool {
        self.flags.contains(flag)
    }

    /// Checks that this export can replace `previous`, for which requests may be in flight.
    pub(super) fn check_replaces(&self, previous: &Self) -> Result<(), ExportChange> {
        let missing = previous.flags.without(self.flags).intersection(REQUIRED_FLAGS);
        if self.size < previous.size {
            return Err(ExportChange::Smaller { from: ByteLen::new(previous.size), to: ByteLen::new(self.size) });
        }
        if self.has(TransmissionFlags::READ_ONLY) && !previous.has(TransmissionFlags::READ_ONLY) {
            return Err(ExportChange::ReadOnly);
        }
        // Requests are whole sectors, even if the old minimum was smaller.
        if self.sizes.minimum > previous.sizes.minimum.max(super::SECTOR) {
            return Err(ExportChange::LargerBlocks { from: previous.sizes.minimum, to: self.sizes.minimum });
        }
        if missing != TransmissionFlags::NONE {
            return Err(ExportChange::Lost(missing.to_string()));
        }
        if self.sizes.payload_max < previous.sizes.payload_max {
            return Err(ExportChange::Lost(format!(
                "payloads of {}",
                ByteLen::new(u64::from(previous.sizes.payload_max))
            )));
        }
        if self.allocation.is_none() && previous.allocation.is_some() {
            return Err(ExportChange::Lost(BASE_ALLOCATION.to_owned()));
        }
        Ok(())
    }
}
