//! A server for tests, written from the specification without Larder's code: it follows a script, protocol violations
//! included.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const DISCONNECT: u16 = 2;
pub const FLUSH: u16 = 3;
pub const TRIM: u16 = 4;
pub const ZERO: u16 = 6;
pub const STATUS: u16 = 7;

/// HAS_FLAGS, FLUSH, TRIM, WRITE_ZEROES; no FUA.
pub const FLAGS: u16 = 1 | 1 << 2 | 1 << 5 | 1 << 6;

/// One client's connection.
pub struct Peer(UnixStream);

#[derive(Clone, Debug)]
pub struct Asked {
    pub flags: u16,
    pub command: u16,
    pub cookie: u64,
    pub offset: u64,
    pub len: u32,
    pub payload: Vec<u8>,
}

/// The features that the handshake offers.
#[derive(Clone, Copy)]
pub struct Offer {
    pub size: u64,
    pub flags: u16,
    pub structured: bool,
    pub blocks: Option<[u32; 3]>,
}

impl Offer {
    pub fn of(size: u64) -> Self {
        Self { size, flags: FLAGS, structured: false, blocks: None }
    }
}

impl Peer {
    pub fn take<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.0.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    pub fn bytes(&mut self, len: u32) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; len as usize];
        self.0.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    pub fn send(&mut self, parts: &[&[u8]]) -> io::Result<()> {
        self.0.write_all(&parts.concat())
    }

    /// Waits until the client closes the connection.
    pub fn wait_for_end(&mut self) {
        let _ = io::copy(&mut self.0, &mut io::sink());
    }

    pub fn greet(&mut self) -> io::Result<()> {
        self.send(&[b"NBDMAGIC", b"IHAVEOPT", &3u16.to_be_bytes()])?;
        self.take::<4>()?;
        Ok(())
    }

    /// Receives the next option: its number and data.
    pub fn option(&mut self) -> io::Result<(u32, Vec<u8>)> {
        assert_eq!(&self.take::<8>()?, b"IHAVEOPT");
        let option = u32::from_be_bytes(self.take()?);
        let len = u32::from_be_bytes(self.take()?);
        Ok((option, self.bytes(len)?))
    }

    pub fn answer(&mut self, option: u32, kind: u32, data: &[u8]) -> io::Result<()> {
        self.send(&[
            &0x3e889045565a9u64.to_be_bytes(),
            &option.to_be_bytes(),
            &kind.to_be_bytes(),
            &(data.len() as u32).to_be_bytes(),
            data,
        ])
    }

    /// Does a whole, honest handshake.
    pub fn handshake(&mut self, offer: Offer) -> io::Result<()> {
        self.greet()?;
        loop {
            let (option, _) = self.option()?;
            match option {
                8 if offer.structured => self.answer(option, 1, &[])?,
                10 if offer.structured => {
                    let data = [&9u32.to_be_bytes()[..], b"base:allocation"].concat();
                    self.answer(option, 4, &data)?;
                    self.answer(option, 1, &[])?;
                }
                7 => {
                    self.info(offer)?;
                    return self.answer(option, 1, &[]);
                }
                _ => self.answer(option, 1 << 31 | 1, &[])?,
            }
        }
    }

    pub fn info(&mut self, offer: Offer) -> io::Result<()> {
        let size = offer.size.to_be_bytes();
        let data = [&0u16.to_be_bytes()[..], &size, &offer.flags.to_be_bytes()].concat();
        self.answer(7, 3, &data)?;
        if let Some(blocks) = offer.blocks {
            let mut data = 3u16.to_be_bytes().to_vec();
            data.extend(blocks.iter().flat_map(|size| size.to_be_bytes()));
            self.answer(7, 3, &data)?;
        }
        Ok(())
    }

    /// Receives the next request's header; its payload is still to be read.
    pub fn header(&mut self) -> io::Result<Asked> {
        assert_eq!(self.take::<4>()?, 0x25609513u32.to_be_bytes());
        Ok(Asked {
            flags: u16::from_be_bytes(self.take()?),
            command: u16::from_be_bytes(self.take()?),
            cookie: u64::from_be_bytes(self.take()?),
            offset: u64::from_be_bytes(self.take()?),
            len: u32::from_be_bytes(self.take()?),
            payload: Vec::new(),
        })
    }

    /// Receives the next request with its payload.
    pub fn request(&mut self) -> io::Result<Asked> {
        let mut asked = self.header()?;
        if asked.command == WRITE {
            asked.payload = self.bytes(asked.len)?;
        }
        Ok(asked)
    }

    pub fn simple(&mut self, cookie: u64, error: u32, data: &[u8]) -> io::Result<()> {
        self.send(&[&0x67446698u32.to_be_bytes(), &error.to_be_bytes(), &cookie.to_be_bytes(), data])
    }

    /// Sends a chunk's header that announces `len` bytes of payload.
    pub fn chunk(&mut self, done: bool, kind: u16, cookie: u64, len: u32) -> io::Result<()> {
        self.send(&[
            &0x668e33efu32.to_be_bytes(),
            &u16::from(done).to_be_bytes(),
            &kind.to_be_bytes(),
            &cookie.to_be_bytes(),
            &len.to_be_bytes(),
        ])
    }

    /// Serves `disk` honestly until the client disconnects.
    pub fn serve(&mut self, structured: bool, disk: &Disk) -> io::Result<()> {
        loop {
            let asked = self.request()?;
            if asked.command == DISCONNECT {
                return Ok(());
            }
            self.reply(structured, &asked, disk)?;
        }
    }

    /// Carries out a request and answers it.
    pub fn reply(&mut self, structured: bool, asked: &Asked, disk: &Disk) -> io::Result<()> {
        let data = disk.carry_out(asked);
        if asked.command == READ && structured {
            self.chunk(true, 1, asked.cookie, asked.len + 8)?;
            return self.send(&[&asked.offset.to_be_bytes(), &data]);
        }
        self.simple(asked.cookie, 0, &data)
    }
}

/// The durable content of a server's disk, and the volatile content in its memory.
#[derive(Clone)]
pub struct Disk(Arc<Mutex<Images>>);

struct Images {
    volatile: Vec<u8>,
    durable: Vec<u8>,
    flushes: usize,
}

impl Disk {
    pub fn new(size: u64) -> Self {
        Self(Arc::new(Mutex::new(Images {
            volatile: vec![0; size as usize],
            durable: vec![0; size as usize],
            flushes: 0,
        })))
    }

    pub fn grow(&self, size: u64) {
        let mut images = self.0.lock().unwrap();
        images.volatile.resize(size as usize, 0);
        images.durable.resize(size as usize, 0);
    }

    pub fn carry_out(&self, asked: &Asked) -> Vec<u8> {
        let images = &mut *self.0.lock().unwrap();
        let range = asked.offset as usize..asked.offset as usize + asked.len as usize;
        match asked.command {
            READ => return images.volatile[range].to_vec(),
            WRITE => images.volatile[range].copy_from_slice(&asked.payload),
            ZERO => images.volatile[range].fill(0),
            // Trimmed bytes may have any content; an odd value exposes code that relies on one.
            TRIM => images.volatile[range].fill(0xee),
            FLUSH => {
                images.durable.clone_from(&images.volatile);
                images.flushes += 1;
            }
            command => panic!("command {command}"),
        }
        Vec::new()
    }

    /// Simulates a power loss of the server's host.
    pub fn forget(&self) {
        let images = &mut *self.0.lock().unwrap();
        images.volatile.clone_from(&images.durable);
    }

    pub fn durable(&self) -> Vec<u8> {
        self.0.lock().unwrap().durable.clone()
    }

    pub fn volatile(&self) -> Vec<u8> {
        self.0.lock().unwrap().volatile.clone()
    }

    pub fn flushes(&self) -> usize {
        self.0.lock().unwrap().flushes
    }
}

type Script = Box<dyn FnOnce(Peer) -> io::Result<()> + Send>;

/// Wraps the script of a connection. An error closes the connection.
pub fn script(steps: impl FnOnce(Peer) -> io::Result<()> + Send + 'static) -> Script {
    Box::new(steps)
}

/// Serves one connection after another, each by its script. Join the thread to see panics.
pub fn connections(
    listener: UnixListener,
    scripts: impl IntoIterator<Item = Script> + Send + 'static,
) -> JoinHandle<()> {
    std::thread::spawn(move || {
        for script in scripts {
            let (stream, _) = listener.accept().expect("a connection");
            let _ = script(Peer(stream));
        }
    })
}
