//! The handshake phase: options, their replies, and their data (spec, "Handshake phase").

use super::flags::TransmissionFlags;
use super::{Fields, Malformed, PAYLOAD_LEN_MAX};

/// "NBDMAGIC": the first word of every server.
pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// "IHAVEOPT": the second word of a newstyle server, and the first of every option.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// The second word of an oldstyle server.
pub const OLDSTYLE_MAGIC: u64 = 0x0000_4202_8186_1253;
/// The first word of every reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// Handshake flag, and the client's answer to it: options get replies.
pub const FIXED_NEWSTYLE: u16 = 1 << 0;
/// Handshake flag, and the client's answer to it: no padding after the reply to `EXPORT_NAME`.
pub const NO_ZEROES: u16 = 1 << 1;

/// The length of the padding after the reply to `EXPORT_NAME`, in bytes.
pub const EXPORT_NAME_PADDING: usize = 124;

/// Option numbers (spec, "Option types").
#[allow(missing_docs)]
pub mod options {
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const STARTTLS: u32 = 5;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Types of replies to options (spec, "Option reply types"). Errors have the highest bit set.
#[allow(missing_docs)]
pub mod replies {
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    pub const ERROR: u32 = 1 << 31;
    pub const ERR_UNSUP: u32 = ERROR | 1;
    pub const ERR_POLICY: u32 = ERROR | 2;
    pub const ERR_INVALID: u32 = ERROR | 3;
    pub const ERR_PLATFORM: u32 = ERROR | 4;
    pub const ERR_TLS_REQD: u32 = ERROR | 5;
    pub const ERR_UNKNOWN: u32 = ERROR | 6;
    pub const ERR_SHUTDOWN: u32 = ERROR | 7;
    pub const ERR_BLOCK_SIZE_REQD: u32 = ERROR | 8;
    pub const ERR_TOO_BIG: u32 = ERROR | 9;
    pub const ERR_EXT_HEADER_REQD: u32 = ERROR | 10;
}

/// Types of information about an export (spec, `NBD_REP_INFO`).
#[allow(missing_docs)]
pub mod infos {
    pub const EXPORT: u16 = 0;
    pub const NAME: u16 = 1;
    pub const DESCRIPTION: u16 = 2;
    pub const BLOCK_SIZE: u16 = 3;
}

/// Returns an option's name as in the spec.
pub fn option_name(option: u32) -> &'static str {
    match option {
        options::EXPORT_NAME => "EXPORT_NAME",
        options::ABORT => "ABORT",
        options::LIST => "LIST",
        options::STARTTLS => "STARTTLS",
        options::INFO => "INFO",
        options::GO => "GO",
        options::STRUCTURED_REPLY => "STRUCTURED_REPLY",
        options::LIST_META_CONTEXT => "LIST_META_CONTEXT",
        options::SET_META_CONTEXT => "SET_META_CONTEXT",
        options::EXTENDED_HEADERS => "EXTENDED_HEADERS",
        _ => "an unknown option",
    }
}

/// Returns the meaning of an error reply to an option.
pub fn reply_error_text(kind: u32) -> &'static str {
    match kind {
        replies::ERR_UNSUP => "it does not support that option",
        replies::ERR_POLICY => "its configuration forbids that",
        replies::ERR_INVALID => "it considers the request invalid",
        replies::ERR_PLATFORM => "it was built without that",
        replies::ERR_TLS_REQD => "it requires TLS",
        replies::ERR_UNKNOWN => "it has no such export",
        replies::ERR_SHUTDOWN => "it is shutting down",
        replies::ERR_BLOCK_SIZE_REQD => "it requires the client to request block sizes",
        replies::ERR_TOO_BIG => "the request or its reply is too large",
        replies::ERR_EXT_HEADER_REQD => "it requires extended headers",
        _ => "it reports an error that is not in the specification",
    }
}

/// The length of the server's first message, in bytes.
pub const GREETING_LEN: usize = 18;

/// Encodes the server's first message: two magic numbers and the handshake flags.
pub fn encode_greeting(flags: u16) -> [u8; GREETING_LEN] {
    let mut message = [0; GREETING_LEN];
    message[..8].copy_from_slice(&INIT_MAGIC.to_be_bytes());
    message[8..16].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
    message[16..].copy_from_slice(&flags.to_be_bytes());
    message
}

/// Returns the handshake flags in a server's first message.
///
/// # Errors
/// The message does not come from a newstyle NBD server.
pub fn parse_greeting(message: &[u8; GREETING_LEN]) -> Result<u16, Malformed> {
    let mut fields = Fields::new("the server's greeting", message);
    fields.magic(INIT_MAGIC)?;
    fields.magic(OPTION_MAGIC)?;
    fields.u16("flags")
}

/// The length of an option's header, in bytes.
pub const OPTION_HEADER_LEN: usize = 16;

/// An option's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionHeader {
    /// The option's number, one of [`options`].
    pub option: u32,
    /// The length in bytes of the data after the header.
    pub len: u32,
}

impl OptionHeader {
    /// Parses a header.
    ///
    /// # Errors
    /// The magic number is wrong.
    pub fn parse(message: &[u8; OPTION_HEADER_LEN]) -> Result<Self, Malformed> {
        let mut fields = Fields::new("an option", message);
        fields.magic(OPTION_MAGIC)?;
        Ok(Self { option: fields.u32("number")?, len: fields.u32("length")? })
    }
}

/// Encodes an option with its data.
pub fn encode_option(option: u32, data: &[u8]) -> Vec<u8> {
    let mut message = Vec::with_capacity(OPTION_HEADER_LEN + data.len());
    message.extend(OPTION_MAGIC.to_be_bytes());
    message.extend(option.to_be_bytes());
    push_len(&mut message, data.len());
    message.extend(data);
    message
}

/// The length of the header of a reply to an option, in bytes.
pub const OPTION_REPLY_HEADER_LEN: usize = 20;

/// The header of a reply to an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionReplyHeader {
    /// The option that is answered.
    pub option: u32,
    /// The type of the reply, one of [`replies`].
    pub kind: u32,
    /// The length in bytes of the data after the header.
    pub len: u32,
}

impl OptionReplyHeader {
    /// Parses a header.
    ///
    /// # Errors
    /// The magic number is wrong.
    pub fn parse(message: &[u8; OPTION_REPLY_HEADER_LEN]) -> Result<Self, Malformed> {
        let mut fields = Fields::new("a reply to an option", message);
        fields.magic(OPTION_REPLY_MAGIC)?;
        Ok(Self { option: fields.u32("option")?, kind: fields.u32("kind")?, len: fields.u32("length")? })
    }

    /// Returns true if the reply reports an error.
    pub fn is_error(&self) -> bool {
        self.kind & replies::ERROR != 0
    }
}

/// Appends a reply to an option.
pub fn push_option_reply(message: &mut Vec<u8>, option: u32, kind: u32, data: &[u8]) {
    message.extend(OPTION_REPLY_MAGIC.to_be_bytes());
    message.extend(option.to_be_bytes());
    message.extend(kind.to_be_bytes());
    push_len(message, data.len());
    message.extend(data);
}

/// The sizes of requests that an export demands or prefers, in bytes (spec, "Size constraints").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSizes {
    /// The unit of every offset and length.
    pub minimum: u32,
    /// The unit of the most efficient requests.
    pub preferred: u32,
    /// The maximum payload of a request or reply.
    pub payload_max: u32,
}

impl BlockSizes {
    /// The sizes that a client may assume if the server does not report any.
    pub const DEFAULT: Self = Self { minimum: 512, preferred: 4096, payload_max: PAYLOAD_LEN_MAX };
}

/// A piece of information about an export (spec, `NBD_REP_INFO`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExportInfo<'a> {
    /// The size and features of the export.
    Export {
        /// The size in bytes.
        size: u64,
        /// The features of the export.
        flags: TransmissionFlags,
    },
    /// The server's canonical name of the export.
    Name(&'a str),
    /// A description for human readers.
    Description(&'a str),
    /// The sizes of requests.
    BlockSize(BlockSizes),
    /// Information of an unknown type.
    Unknown(u16),
}

impl<'a> ExportInfo<'a> {
    /// Parses the data of an `NBD_REP_INFO`.
    ///
    /// # Errors
    /// The length does not match the type, or a text is not UTF-8.
    pub fn parse(data: &'a [u8]) -> Result<Self, Malformed> {
        let mut fields = Fields::new("information about the export", data);
        let kind = fields.u16("kind")?;
        let text_len = data.len() - 2;
        let info = match kind {
            infos::EXPORT => Self::Export { size: fields.u64("size")?, flags: TransmissionFlags(fields.u16("flags")?) },
            infos::NAME => Self::Name(fields.text(text_len, "name")?),
            infos::DESCRIPTION => Self::Description(fields.text(text_len, "description")?),
            infos::BLOCK_SIZE => Self::BlockSize(BlockSizes {
                minimum: fields.u32("minimum block size")?,
                preferred: fields.u32("preferred block size")?,
                payload_max: fields.u32("maximum payload")?,
            }),
            other => return Ok(Self::Unknown(other)),
        };
        fields.end()?;
        Ok(info)
    }

    /// Encodes the information as the data of an `NBD_REP_INFO`.
    pub fn encode(&self) -> Vec<u8> {
        let mut data = Vec::new();
        match self {
            Self::Export { size, flags } => {
                data.extend(infos::EXPORT.to_be_bytes());
                data.extend(size.to_be_bytes());
                data.extend(flags.0.to_be_bytes());
            }
            Self::Name(name) => {
                data.extend(infos::NAME.to_be_bytes());
                data.extend(name.as_bytes());
            }
            Self::Description(text) => {
                data.extend(infos::DESCRIPTION.to_be_bytes());
                data.extend(text.as_bytes());
            }
            Self::BlockSize(sizes) => {
                data.extend(infos::BLOCK_SIZE.to_be_bytes());
                data.extend(sizes.minimum.to_be_bytes());
                data.extend(sizes.preferred.to_be_bytes());
                data.extend(sizes.payload_max.to_be_bytes());
            }
            Self::Unknown(kind) => data.extend(kind.to_be_bytes()),
        }
        data
    }
}

/// The data of `NBD_OPT_INFO` and `NBD_OPT_GO`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportRequest<'a> {
    /// The export's name; empty for the default one.
    pub name: &'a str,
    /// The requested [`infos`], as big-endian pairs of bytes.
    requested: &'a [u8],
}

impl<'a> ExportRequest<'a> {
    /// Parses the data of the option.
    ///
    /// # Errors
    /// A length does not match, or the name is not UTF-8.
    pub fn parse(data: &'a [u8]) -> Result<Self, Malformed> {
        let mut fields = Fields::new("the request for an export", data);
        let name = fields.counted_string("name")?;
        let count = fields.u16("number of information requests")?;
        let requested = fields.bytes(2 * usize::from(count), "information requests")?;
        fields.end()?;
        Ok(Self { name, requested })
    }

    /// Encodes the data of the option.
    pub fn encode(name: &str, requested: &[u16]) -> Vec<u8> {
        let mut data = Vec::new();
        push_counted_string(&mut data, name);
        data.extend(u16::try_from(requested.len()).unwrap_or(u16::MAX).to_be_bytes());
        data.extend(requested.iter().flat_map(|kind| kind.to_be_bytes()));
        data
    }

    /// Returns true if a type of [`infos`] is requested.
    pub fn requests(&self, kind: u16) -> bool {
        self.requested.chunks_exact(2).any(|pair| pair == kind.to_be_bytes())
    }
}

/// The data of `NBD_OPT_LIST_META_CONTEXT` and `NBD_OPT_SET_META_CONTEXT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetaContextRequest<'a> {
    /// The export's name.
    pub name: &'a str,
    /// The names of contexts, or patterns that match several.
    pub queries: Vec<&'a str>,
}

/// The maximum number of queries; no client needs more.
const META_CONTEXT_QUERIES_MAX: u32 = 1024;

impl<'a> MetaContextRequest<'a> {
    /// Parses the data of the option.
    ///
    /// # Errors
    /// A length does not match, a text is not UTF-8, or there are more than 1024 queries.
    pub fn parse(data: &'a [u8]) -> Result<Self, Malformed> {
        let mut fields = Fields::new("the request for metadata contexts", data);
        let name = fields.counted_string("name")?;
        let count = fields.u32("number of queries")?;
        if count > META_CONTEXT_QUERIES_MAX {
            return Err(Malformed::Length {
                what: "the list of metadata context queries",
                len: u64::from(count),
                allowed: "1024 are",
            });
        }
        let queries = (0..count).map(|_| fields.counted_string("query")).collect::<Result<_, _>>()?;
        fields.end()?;
        Ok(Self { name, queries })
    }

    /// Encodes the data of the option.
    pub fn encode(&self) -> Vec<u8> {
        let mut data = Vec::new();
        push_counted_string(&mut data, self.name);
        push_len(&mut data, self.queries.len());
        for query in &self.queries {
            push_counted_string(&mut data, query);
        }
        data
    }
}

/// Returns a metadata context's ID and name, from the data of an `NBD_REP_META_CONTEXT`.
///
/// # Errors
/// The data is too short or too long, or the name is not UTF-8.
pub fn parse_meta_context(data: &[u8]) -> Result<(u32, &str), Malformed> {
    let mut fields = Fields::new("a metadata context", data);
    let id = fields.u32("number")?;
    let name = fields.string(fields.rest().len(), "name")?;
    Ok((id, name))
}

/// Encodes the data of an `NBD_REP_META_CONTEXT`.
pub fn encode_meta_context(id: u32, name: &str) -> Vec<u8> {
    let mut data = id.to_be_bytes().to_vec();
    data.extend(name.as_bytes());
    data
}

/// Encodes the data of an `NBD_REP_SERVER`.
pub fn encode_server(name: &str, description: &str) -> Vec<u8> {
    let mut data = Vec::new();
    push_counted_string(&mut data, name);
    data.extend(description.as_bytes());
    data
}

/// Appends a string's length and the string.
fn push_counted_string(message: &mut Vec<u8>, text: &str) {
    push_len(message, text.len());
    message.extend(text.as_bytes());
}

/// Appends a length or count in 32 bits. All lengths that are sent fit.
fn push_len(message: &mut Vec<u8>, len: usize) {
    debug_assert!(u32::try_from(len).is_ok());
    message.extend((len as u32).to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn garbage_never_panics(data in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = ExportInfo::parse(&data);
            let _ = ExportRequest::parse(&data);
            let _ = MetaContextRequest::parse(&data);
            let _ = parse_meta_context(&data);
        }

        #[test]
        fn meta_context_request_round_trips(
            name in "[^\0]{0,20}", queries in prop::collection::vec("[^\0]{0,20}", 0..5),
        ) {
            let request = MetaContextRequest { name: &name, queries: queries.iter().map(String::as_str).collect() };
            let data = request.encode();
            prop_assert_eq!(MetaContextRequest::parse(&data), Ok(request));
        }
    }

    #[test]
    fn export_request_round_trips() {
        let data = ExportRequest::encode("disk", &[infos::BLOCK_SIZE, infos::NAME]);
        let request = ExportRequest::parse(&data).expect("is well-formed");
        assert_eq!(request.name, "disk");
        assert!(request.requests(infos::BLOCK_SIZE) && !request.requests(infos::DESCRIPTION));
    }

    #[test]
    fn texts_may_end_with_a_nul() {
        for (kind, info) in
            [(infos::NAME, ExportInfo::Name("disk")), (infos::DESCRIPTION, ExportInfo::Description("disk"))]
        {
            let data = |text: &[u8]| [&kind.to_be_bytes(), text].concat();
            assert_eq!(ExportInfo::parse(&data(b"disk\0")), Ok(info));
            assert!(matches!(ExportInfo::parse(&data(b"disk\0\0")), Err(Malformed::Nul { .. })));
        }
        assert_eq!(ExportInfo::parse(&infos::DESCRIPTION.to_be_bytes()), Ok(ExportInfo::Description("")));
    }

    #[test]
    fn length_beyond_message_is_refused() {
        let mut data = ExportRequest::encode("disk", &[]);
        data[3] = 200;
        assert!(matches!(ExportRequest::parse(&data), Err(Malformed::Truncated { field: "name", .. })));
        data[0] = 0xff;
        assert!(matches!(ExportRequest::parse(&data), Err(Malformed::Length { what: "name", .. })));
        assert!(MetaContextRequest::parse(&[0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]).is_err(), "four billion queries");
    }
}
