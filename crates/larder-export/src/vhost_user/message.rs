//! vhost-user wire format: parses requests of the front-end, and encodes replies. Pure functions, no state.
//!
//! Source: QEMU `docs/interop/vhost-user.rst`. A message is a header of three little-endian u32 (request, flags,
//! payload size) and a payload, with descriptors as ancillary data.

use std::os::fd::OwnedFd;

/// Size of the header, in bytes.
pub const HEADER_BYTES: usize = 12;

/// Largest payload of a supported request, in bytes: a configuration write. A larger one is refused unread.
pub const PAYLOAD_BYTES_MAX: usize = 1024;

/// Largest number of memory regions in one SET_MEM_TABLE.
pub const TABLE_REGIONS_MAX: usize = 8;

const VERSION: u32 = 1;
const FLAG_REPLY: u32 = 1 << 2;
/// Flag that requests an acknowledgement.
pub(super) const FLAG_NEED_REPLY: u32 = 1 << 3;

/// Header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageHeader {
    /// Number of the request.
    pub request: u32,
    /// True if the front-end wants an acknowledgement of a request without a reply.
    pub need_reply: bool,
    /// Length of the payload, in bytes.
    pub payload_bytes: usize,
}

/// Reason why a message cannot be parsed. The connection is closed, because the start of the next message is unknown.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// Another protocol version, or a reply where a request belongs.
    #[error("message flags {0:#x} are not those of a version 1 request; is the client a vhost-user front-end?")]
    Flags(u32),
    /// A payload longer than any request has.
    #[error("a payload of {0} bytes; at most {PAYLOAD_BYTES_MAX} are allowed")]
    TooLong(usize),
    /// A request that is unknown, or was not offered.
    #[error("unknown request {0}")]
    UnknownRequest(u32),
    /// A payload of the wrong size.
    #[error("request {request} with a payload of {got} bytes, at least {expected} expected")]
    ShortPayload {
        /// Number of the request.
        request: u32,
        /// Expected length, in bytes.
        expected: usize,
        /// Received length, in bytes.
        got: usize,
    },
    /// Descriptors missing or left over.
    #[error("request {request} came with {got} descriptors, {expected} expected")]
    Descriptors {
        /// Number of the request.
        request: u32,
        /// Expected number of descriptors.
        expected: usize,
        /// Received number of descriptors.
        got: usize,
    },
    /// More descriptors than any request has.
    #[error("{0} descriptors with one message; at most {TABLE_REGIONS_MAX} are allowed")]
    TooManyDescriptors(usize),
    /// More memory regions than a table holds.
    #[error("a memory table of {0} regions; at most {TABLE_REGIONS_MAX} are allowed")]
    TooManyRegions(u32),
}

/// Region of guest memory, as announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionInfo {
    /// Guest-physical address.
    pub guest_address: u64,
    /// Length, in bytes.
    pub len: u64,
    /// Address in the front-end's address space.
    pub user_address: u64,
    /// Offset in the file of the descriptor, in bytes.
    pub file_offset: u64,
}

/// Addresses of the parts of a ring, in the front-end's address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct RingAddresses {
    /// Address of the descriptor table (split) or descriptor ring (packed).
    pub descriptors: u64,
    /// Address of the available ring, or of the driver event suppression.
    pub driver: u64,
    /// Address of the used ring, or of the device event suppression.
    pub device: u64,
    /// True if writes to the used ring are to be logged.
    pub log: bool,
}

/// In-flight region, as announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InflightInfo {
    /// Size, in bytes.
    pub bytes: u64,
    /// Offset in the file of the descriptor, in bytes.
    pub file_offset: u64,
    /// Number of queues.
    pub queues: u16,
    /// Number of descriptors of each queue.
    pub queue_size: u16,
}

/// Request of the front-end.
#[derive(Debug)]
#[allow(missing_docs)]
pub enum FrontendRequest {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    ResetDevice,
    SetMemTable(Vec<(RegionInfo, OwnedFd)>),
    SetLogBase {
        bytes: u64,
        file_offset: u64,
        file: OwnedFd,
    },
    SetLogEvent,
    SetRingSize {
        ring: u32,
        size: u32,
    },
    SetRingAddresses {
        ring: u32,
        addresses: RingAddresses,
    },
    SetRingBase {
        ring: u32,
        base: u32,
    },
    GetRingBase {
        ring: u32,
    },
    /// Kick event of a ring; without a descriptor, the ring is to be polled.
    SetRingKick {
        ring: u32,
        event: Option<OwnedFd>,
    },
    SetRingCall {
        ring: u32,
        event: Option<OwnedFd>,
    },
    SetRingError {
        ring: u32,
        event: Option<OwnedFd>,
    },
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueCount,
    SetRingEnable {
        ring: u32,
        enable: bool,
    },
    SetBackendChannel(OwnedFd),
    GetConfig {
        offset: u32,
        len: u32,
    },
    SetConfig {
        offset: u32,
        bytes: Vec<u8>,
    },
    GetInflight(InflightInfo),
    SetInflight(InflightInfo, OwnedFd),
    GetMaxMemSlots,
    AddMemRegion(RegionInfo, OwnedFd),
    RemMemRegion(RegionInfo),
    SetStatus(u64),
    GetStatus,
}

/// Numbers of the requests that have a reply or are named in messages.
#[allow(missing_docs)]
pub mod number {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_LOG_BASE: u32 = 6;
    pub const SET_LOG_FD: u32 = 7;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
    pub const SET_STATUS: u32 = 39;
    pub const GET_STATUS: u32 = 40;
    /// Number of a message on the back-end's own channel.
    pub const BACKEND_CONFIG_CHANGE: u32 = 2;
}

/// Parses a header.
///
/// # Errors
/// The header is not that of a request, or announces too long a payload.
pub fn parse_header(bytes: &[u8; HEADER_BYTES]) -> Result<MessageHeader, MessageError> {
    let [request, flags, size] = [0, 4, 8].map(|at| u32_at(bytes, at));
    if flags & 3 != VERSION || flags & FLAG_REPLY != 0 {
        return Err(MessageError::Flags(flags));
    }
    let payload_bytes = size as usize;
    if payload_bytes > PAYLOAD_BYTES_MAX {
        return Err(MessageError::TooLong(payload_bytes));
    }
    Ok(MessageHeader { request, need_reply: flags & FLAG_NEED_REPLY != 0, payload_bytes })
}

/// Adds the descriptors that came with one part of a message to those of the parts before it.
///
/// # Errors
/// No message has that many descriptors.
pub fn add_descriptors(descriptors: &mut Vec<OwnedFd>, received: Vec<OwnedFd>) -> Result<(), MessageError> {
    descriptors.extend(received);
    if descriptors.len() > TABLE_REGIONS_MAX {
        return Err(MessageError::TooManyDescriptors(descriptors.len()));
    }
    Ok(())
}

/// Returns the little-endian u32 at byte `at`.
pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    little_endian(&bytes[at..at + 4]) as u32
}

/// Returns the little-endian u64 at byte `at`.
pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    little_endian(&bytes[at..at + 8])
}

fn little_endian(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

/// Parses the request that `header` announced, from its whole payload and the descriptors that came with it.
///
/// # Errors
/// The request is unknown, or its payload or descriptors do not fit it.
pub fn parse_request(
    header: &MessageHeader,
    payload: &[u8],
    descriptors: Vec<OwnedFd>,
) -> Result<FrontendRequest, MessageError> {
    let request = header.request;
    let need = |expected: usize| {
        if payload.len() < expected {
            return Err(MessageError::ShortPayload { request, expected, got: payload.len() });
        }
        Ok(())
    };
    let mut descriptors = Descriptors { request, received: descriptors.len(), remaining: descriptors.into_iter() };
    let parsed = match request {
        number::GET_FEATURES => FrontendRequest::GetFeatures,
        number::SET_OWNER => FrontendRequest::SetOwner,
        number::RESET_OWNER => FrontendRequest::ResetOwner,
        number::RESET_DEVICE => FrontendRequest::ResetDevice,
        number::GET_PROTOCOL_FEATURES => FrontendRequest::GetProtocolFeatures,
        number::GET_QUEUE_NUM => FrontendRequest::GetQueueCount,
        number::GET_MAX_MEM_SLOTS => FrontendRequest::GetMaxMemSlots,
        number::GET_STATUS => FrontendRequest::GetStatus,
        number::SET_FEATURES | number::SET_PROTOCOL_FEATURES | number::SET_STATUS => {
            need(8)?;
            let value = u64_at(payload, 0);
            match request {
                number::SET_FEATURES => FrontendRequest::SetFeatures(value),
                number::SET_STATUS => FrontendRequest::SetStatus(value),
                _ => FrontendRequest::SetProtocolFeatures(value),
            }
        }
        number::SET_MEM_TABLE => {
            need(8)?;
            let count = u32_at(payload, 0);
            if count as usize > TABLE_REGIONS_MAX {
                return Err(MessageError::TooManyRegions(count));
            }
            need(8 + 32 * count as usize)?;
            let mut regions = Vec::new();
            for index in 0..count as usize {
                regions.push((region_at(payload, 8 + 32 * index), descriptors.one()?));
            }
            FrontendRequest::SetMemTable(regions)
        }
        number::SET_LOG_BASE => {
            need(16)?;
            FrontendRequest::SetLogBase {
                bytes: u64_at(payload, 0),
                file_offset: u64_at(payload, 8),
                file: descriptors.one()?,
            }
        }
        number::SET_LOG_FD => {
            // An event for changes of the log, for which no known front-end waits: accepted and closed.
            drop(descriptors.one()?);
            FrontendRequest::SetLogEvent
        }
        number::SET_VRING_NUM | number::SET_VRING_BASE | number::GET_VRING_BASE | number::SET_VRING_ENABLE => {
            need(8)?;
            let (ring, value) = (u32_at(payload, 0), u32_at(payload, 4));
            match request {
                number::SET_VRING_NUM => FrontendRequest::SetRingSize { ring, size: value },
                number::SET_VRING_BASE => FrontendRequest::SetRingBase { ring, base: value },
                number::GET_VRING_BASE => FrontendRequest::GetRingBase { ring },
                _ => FrontendRequest::SetRingEnable { ring, enable: value != 0 },
            }
        }
        number::SET_VRING_ADDR => {
            need(40)?;
            FrontendRequest::SetRingAddresses {
                ring: u32_at(payload, 0),
                addresses: RingAddresses {
                    log: u32_at(payload, 4) & 1 != 0,
                    descriptors: u64_at(payload, 8),
                    device: u64_at(payload, 16),
                    driver: u64_at(payload, 24),
                },
            }
        }
        number::SET_VRING_KICK | number::SET_VRING_CALL | number::SET_VRING_ERR => {
            need(8)?;
            let value = u64_at(payload, 0);
            let ring = (value & 0xff) as u32;
            let event = if value & 0x100 == 0 { Some(descriptors.one()?) } else { None };
            match request {
                number::SET_VRING_KICK => FrontendRequest::SetRingKick { ring, event },
                number::SET_VRING_CALL => FrontendRequest::SetRingCall { ring, event },
                _ => FrontendRequest::SetRingError { ring, event },
            }
        }
        number::SET_BACKEND_REQ_FD => FrontendRequest::SetBackendChannel(descriptors.one()?),
        number::GET_CONFIG => {
            need(12)?;
            FrontendRequest::GetConfig { offset: u32_at(payload, 0), len: u32_at(payload, 4) }
        }
        number::SET_CONFIG => {
            need(12)?;
            let len = u32_at(payload, 4) as usize;
            need(12usize.saturating_add(len))?;
            FrontendRequest::SetConfig { offset: u32_at(payload, 0), bytes: payload[12..12 + len].to_vec() }
        }
        number::GET_INFLIGHT_FD | number::SET_INFLIGHT_FD => {
            need(20)?;
            let info = InflightInfo {
                bytes: u64_at(payload, 0),
                file_offset: u64_at(payload, 8),
                queues: u32_at(payload, 16) as u16,
                queue_size: (u32_at(payload, 16) >> 16) as u16,
            };
            if request == number::GET_INFLIGHT_FD {
                FrontendRequest::GetInflight(info)
            } else {
                FrontendRequest::SetInflight(info, descriptors.one()?)
            }
        }
        number::ADD_MEM_REG | number::REM_MEM_REG => {
            need(40)?;
            let region = region_at(payload, 8);
            if request == number::ADD_MEM_REG {
                FrontendRequest::AddMemRegion(region, descriptors.one()?)
            } else {
                // Some front-ends send the descriptor here, too.
                descriptors.remaining = Vec::new().into_iter();
                FrontendRequest::RemMemRegion(region)
            }
        }
        other => return Err(MessageError::UnknownRequest(other)),
    };
    descriptors.none_left()?;
    Ok(parsed)
}

struct Descriptors {
    request: u32,
    received: usize,
    remaining: std::vec::IntoIter<OwnedFd>,
}

impl Descriptors {
    fn one(&mut self) -> Result<OwnedFd, MessageError> {
        self.remaining.next().ok_or(MessageError::Descriptors {
            request: self.request,
            expected: self.received + 1,
            got: self.received,
        })
    }

    fn none_left(&self) -> Result<(), MessageError> {
        match self.remaining.len() {
            0 => Ok(()),
            remaining => Err(MessageError::Descriptors {
                request: self.request,
                expected: self.received - remaining,
                got: self.received,
            }),
        }
    }
}

fn region_at(payload: &[u8], at: usize) -> RegionInfo {
    RegionInfo {
        guest_address: u64_at(payload, at),
        len: u64_at(payload, at + 8),
        user_address: u64_at(payload, at + 16),
        file_offset: u64_at(payload, at + 24),
    }
}

/// Encodes the reply to `request` with this payload.
pub fn reply(request: u32, payload: &[u8]) -> Vec<u8> {
    encode(request, VERSION | FLAG_REPLY, payload)
}

/// Encodes a reply of one u64: features, counts, acknowledgements (0 is success).
pub fn reply_u64(request: u32, value: u64) -> Vec<u8> {
    reply(request, &value.to_le_bytes())
}

/// Encodes a reply of a ring's number and a value.
pub fn reply_ring(request: u32, ring: u32, value: u32) -> Vec<u8> {
    reply(request, &[ring.to_le_bytes(), value.to_le_bytes()].concat())
}

/// Encodes a reply with a part of the configuration space; an empty part means that the request was refused.
pub fn reply_config(offset: u32, bytes: &[u8]) -> Vec<u8> {
    let len = bytes.len() as u32;
    let head = [offset.to_le_bytes(), len.to_le_bytes(), 0u32.to_le_bytes()].concat();
    reply(number::GET_CONFIG, &[&head, bytes].concat())
}

/// Encodes a reply that describes the in-flight region.
pub fn reply_inflight(info: &InflightInfo) -> Vec<u8> {
    let mut payload = [info.bytes.to_le_bytes(), info.file_offset.to_le_bytes()].concat();
    payload.extend(info.queues.to_le_bytes());
    payload.extend(info.queue_size.to_le_bytes());
    // The front-end's structure ends at a multiple of 8 bytes.
    payload.extend([0; 4]);
    reply(number::GET_INFLIGHT_FD, &payload)
}

/// Encodes a message on the back-end's own channel: the configuration space has changed.
pub fn config_change() -> Vec<u8> {
    encode(number::BACKEND_CONFIG_CHANGE, VERSION, &[])
}

fn encode(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES + payload.len());
    for word in [request, flags, payload.len() as u32] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend(payload);
    bytes
}
