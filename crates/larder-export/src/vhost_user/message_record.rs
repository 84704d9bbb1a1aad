//! Record of the messages that a front-end has sent and would not repeat to the next server: the last one of each
//! kind, in an order in which a new server can process them.

use std::os::fd::OwnedFd;

use super::message::{FLAG_NEED_REPLY, HEADER_BYTES, number};

/// Message of either side as received, with its descriptors.
#[derive(Debug)]
pub struct RecordedMessage {
    bytes: Vec<u8>,
    descriptors: Vec<OwnedFd>,
    /// Numbers of the descriptors in the descriptor store.
    pub(super) file_numbers: Vec<u64>,
}

impl RecordedMessage {
    /// Creates a message whose header and payload are `bytes`. Missing bytes of a header read as 0.
    pub fn new(bytes: Vec<u8>, descriptors: Vec<OwnedFd>) -> Self {
        Self { bytes, descriptors, file_numbers: Vec::new() }
    }

    /// Creates a message as a front-end would send it, without descriptors.
    fn without_descriptors(request: u32, payload: &[u8]) -> Self {
        let head = [request, 1, payload.len() as u32].map(u32::to_le_bytes).concat();
        Self::new([&head, payload].concat(), Vec::new())
    }

    /// Returns header and payload.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the descriptors that came with the message.
    pub fn descriptors(&self) -> &[OwnedFd] {
        &self.descriptors
    }

    /// Returns the number of the request that the message is, or replies to.
    pub fn request(&self) -> u32 {
        word(&self.bytes, 0)
    }

    fn needs_reply(&self) -> bool {
        word(&self.bytes, 4) & FLAG_NEED_REPLY != 0
    }

    fn payload(&self) -> &[u8] {
        self.bytes.get(HEADER_BYTES..).unwrap_or_default()
    }

    /// Returns the little-endian u32 at byte `at` of the payload; 0 past its end.
    fn word(&self, at: usize) -> u32 {
        word(self.payload(), at)
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    let word = bytes.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
    word.map_or(0, u32::from_le_bytes)
}

/// Order of replay: a message comes after those that it depends on; rings start when all is set up.
const ORDER: &[&[u32]] = &[
    &[number::SET_OWNER],
    &[number::SET_PROTOCOL_FEATURES],
    &[number::SET_FEATURES],
    &[number::SET_STATUS],
    &[number::SET_BACKEND_REQ_FD],
    &[number::SET_LOG_BASE],
    &[number::SET_INFLIGHT_FD],
    &[number::SET_CONFIG],
    MEMORY,
    &[number::SET_VRING_NUM],
    &[number::SET_VRING_BASE],
    &[number::SET_VRING_ADDR],
    &[number::SET_VRING_CALL, number::SET_VRING_ERR],
    &[number::SET_VRING_KICK],
    &[number::SET_VRING_ENABLE],
];

const MEMORY: &[u32] = &[number::SET_MEM_TABLE, number::ADD_MEM_REG, number::REM_MEM_REG];

/// Recorded messages, in the order of replay.
#[derive(Debug, Default)]
pub struct MessageRecord(Vec<RecordedMessage>);

/// Object of a message: a later message of the same kind about the same object replaces it.
#[derive(PartialEq, Eq)]
enum Subject {
    Device,
    Ring(u32),
    Config { offset: u32 },
    Memory { description: Vec<u8> },
}

fn subject(message: &RecordedMessage) -> Subject {
    match message.request() {
        number::SET_VRING_NUM
        | number::SET_VRING_BASE
        | number::GET_VRING_BASE
        | number::SET_VRING_ADDR
        | number::SET_VRING_ENABLE => Subject::Ring(message.word(0)),
        // The byte above says whether there is a descriptor.
        number::SET_VRING_KICK | number::SET_VRING_CALL | number::SET_VRING_ERR => {
            Subject::Ring(message.word(0) & 0xff)
        }
        number::SET_CONFIG => Subject::Config { offset: message.word(0) },
        number::ADD_MEM_REG | number::REM_MEM_REG => Subject::Memory {
            // Guest address, length, address in QEMU.
            description: message.payload().get(8..32).unwrap_or_default().to_vec(),
        },
        _ => Subject::Device,
    }
}

impl MessageRecord {
    /// Returns the messages to replay to a new server, in order.
    pub fn messages(&self) -> &[RecordedMessage] {
        &self.0
    }

    /// Records the effect of `message`, which was answered by `reply` if it has one. Refused messages have no effect.
    pub fn apply(&mut self, message: RecordedMessage, reply: Option<&RecordedMessage>) {
        if reply.is_some_and(|reply| is_refusal(&message, reply)) {
            return;
        }
        match message.request() {
            number::GET_VRING_BASE => {
                // The ring has stopped; the reply has its position.
                let Some(reply) = reply else { return };
                self.remove_matching(|recorded| {
                    recorded.request() == number::SET_VRING_KICK && subject(recorded) == subject(&message)
                });
                self.insert_in_order(RecordedMessage::without_descriptors(number::SET_VRING_BASE, reply.payload()));
            }
            // The rings have stopped at positions that are not known here. A successor starts them: it finds the
            // positions in the in-flight region, and the front-end fetches them next.
            number::SET_STATUS if message.word(0) == 0 => {
                self.remove_matching(|said| said.request() == number::SET_STATUS)
            }
            number::RESET_OWNER => self.remove_matching(|said| said.request() == number::SET_VRING_KICK),
            number::RESET_DEVICE => self.remove_matching(|said| {
                let of_device = [number::SET_FEATURES, number::SET_STATUS].contains(&said.request());
                of_device || matches!(subject(said), Subject::Ring(_))
            }),
            number::SET_MEM_TABLE => {
                self.remove_matching(|said| MEMORY.contains(&said.request()));
                self.insert_in_order(message);
            }
            number::REM_MEM_REG => {
                let before = self.0.len();
                self.remove_matching(|said| {
                    said.request() == number::ADD_MEM_REG && subject(said) == subject(&message)
                });
                if self.0.len() == before {
                    // The region was part of a table.
                    self.insert_in_order(message);
                }
            }
            _ => self.insert_in_order(message),
        }
    }

    /// Records the position at which a running ring has stopped. A successor starts it again from there.
    pub(super) fn set_ring_base(&mut self, ring: u32, base: u32) {
        let position = [ring, base].map(u32::to_le_bytes).concat();
        self.insert_in_order(RecordedMessage::without_descriptors(number::SET_VRING_BASE, &position));
    }

    /// Creates a record from the [`MessageRecord::messages`] of another one.
    pub(super) fn from_messages(messages: Vec<RecordedMessage>) -> Self {
        Self(messages)
    }

    fn remove_matching(&mut self, matches: impl Fn(&RecordedMessage) -> bool) {
        self.0.retain(|said| !matches(said));
    }

    /// Inserts a message at its place in the order, replacing one about the same object. Queries are not recorded.
    fn insert_in_order(&mut self, message: RecordedMessage) {
        let order_of = |said: &RecordedMessage| ORDER.iter().position(|kind| kind.contains(&said.request()));
        let Some(order) = order_of(&message) else { return };
        let is_replaced =
            |said: &RecordedMessage| said.request() == message.request() && subject(said) == subject(&message);
        self.remove_matching(is_replaced);
        let at = self.0.partition_point(|said| order_of(said) <= Some(order));
        self.0.insert(at, message);
    }
}

/// Requests whose reply contains more than success or failure.
const QUERIES: &[u32] = &[
    number::GET_FEATURES,
    number::GET_PROTOCOL_FEATURES,
    number::GET_QUEUE_NUM,
    number::GET_MAX_MEM_SLOTS,
    number::GET_STATUS,
    number::GET_CONFIG,
    number::GET_INFLIGHT_FD,
    number::GET_VRING_BASE,
];

/// Returns whether the server replies to a message: to a query, or with an acknowledgement if one was requested.
/// SET_LOG_BASE is always acknowledged.
pub fn has_reply(message: &RecordedMessage) -> bool {
    message.needs_reply() || message.request() == number::SET_LOG_BASE || QUERIES.contains(&message.request())
}

/// Returns whether `reply` is a negative acknowledgement.
pub fn is_refusal(message: &RecordedMessage, reply: &RecordedMessage) -> bool {
    !QUERIES.contains(&message.request()) && reply.payload().iter().any(|byte| *byte != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Records a message whose payload is little-endian words, with its reply.
    fn record_message(record: &mut MessageRecord, request: u32, words: &[u32]) {
        let payload: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let message = RecordedMessage::without_descriptors(request, &payload);
        let reply = has_reply(&message).then(|| RecordedMessage::without_descriptors(request, &payload));
        record.apply(message, reply.as_ref());
    }

    /// Returns the messages for a successor, each with its first two words.
    fn replayed(record: &MessageRecord) -> Vec<(u32, [u32; 2])> {
        let messages = record.messages().iter();
        messages.map(|message| (message.request(), [message.word(0), message.word(4)])).collect()
    }

    /// A successor receives the last message of each kind, in order of dependency.
    #[test]
    fn last_messages_replay_in_dependency_order() {
        let mut record = MessageRecord::default();
        record_message(&mut record, number::SET_VRING_KICK, &[0x101, 0]);
        record_message(&mut record, number::SET_VRING_BASE, &[1, 7]);
        record_message(&mut record, number::SET_VRING_BASE, &[0, 8]);
        record_message(&mut record, number::GET_FEATURES, &[]);
        record_message(&mut record, number::SET_FEATURES, &[1, 0]);
        record_message(&mut record, number::SET_VRING_BASE, &[1, 9]);
        record_message(&mut record, number::SET_FEATURES, &[3, 0]);
        record_message(&mut record, number::SET_OWNER, &[]);
        let expected = [
            (number::SET_OWNER, [0, 0]),
            (number::SET_FEATURES, [3, 0]),
            (number::SET_VRING_BASE, [0, 8]),
            (number::SET_VRING_BASE, [1, 9]),
            (number::SET_VRING_KICK, [0x101, 0]),
        ];
        assert_eq!(replayed(&record), expected);
    }

    /// A ring that was stopped stays stopped, and one that was started again runs.
    #[test]
    fn ring_state_survives_in_record() {
        let mut record = MessageRecord::default();
        record_message(&mut record, number::SET_VRING_BASE, &[0, 0]);
        record_message(&mut record, number::SET_VRING_KICK, &[0, 0]);
        record_message(&mut record, number::SET_STATUS, &[15, 0]);
        // QEMU stops the device in two steps; only the second one has the ring's position.
        record_message(&mut record, number::SET_STATUS, &[0, 0]);
        let running = [(number::SET_VRING_BASE, [0, 0]), (number::SET_VRING_KICK, [0, 0])];
        assert_eq!(replayed(&record), running);
        record_message(&mut record, number::GET_VRING_BASE, &[0, 5]);
        assert_eq!(replayed(&record), [(number::SET_VRING_BASE, [0, 5])]);
        record_message(&mut record, number::SET_VRING_KICK, &[0, 0]);
        let running = [(number::SET_VRING_BASE, [0, 5]), (number::SET_VRING_KICK, [0, 0])];
        assert_eq!(replayed(&record), running);
    }

    /// Removing a memory region cancels its addition.
    #[test]
    fn removed_memory_region_leaves_record() {
        let region = |address: u32| [0, 0, address, 0, 16, 0, 0, 0, 0, 0];
        let mut record = MessageRecord::default();
        record_message(&mut record, number::SET_MEM_TABLE, &[2]);
        record_message(&mut record, number::ADD_MEM_REG, &region(1));
        record_message(&mut record, number::REM_MEM_REG, &region(1));
        assert_eq!(replayed(&record).len(), 1, "the removal cancels the addition");
        // A region of the table is removed, and added again.
        record_message(&mut record, number::REM_MEM_REG, &region(2));
        record_message(&mut record, number::ADD_MEM_REG, &region(2));
        let requests: Vec<u32> = replayed(&record).into_iter().map(|(request, _)| request).collect();
        let expected = [number::SET_MEM_TABLE, number::REM_MEM_REG, number::ADD_MEM_REG];
        assert_eq!(requests, expected);
        record_message(&mut record, number::SET_MEM_TABLE, &[1]);
        assert_eq!(replayed(&record).len(), 1, "a new table replaces all");
    }
}
