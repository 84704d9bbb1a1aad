//! Measurement of memory that is encoded by one instance of an accelerator.

use std::hint::{black_box, spin_loop};
use std::sync::Arc;

use super::{MeasureError, RoundTrip};
use crate::PAGE;
use crate::accelerator::{
    Accelerator, AcceleratorOpenError, EncodeOutcome, EncodeRequest, Instance, PageBuffer, RequestPool,
};
use crate::batch::Method;

/// Number of requests: more than any instance accepts.
const REQUESTS: usize = 16;

pub(super) struct AcceleratedEncoder {
    method: Method,
    instance: Box<dyn Instance>,
    pool: RequestPool,
    memory: Arc<PageBuffer>,
    /// Offset of the first batch that the instance failed on in this pass.
    failed_at: Option<usize>,
}

impl AcceleratedEncoder {
    pub(super) fn new(
        accelerator: &dyn Accelerator,
        method: Method,
        memory: &[u8],
    ) -> Result<Self, AcceleratorOpenError> {
        let instance = accelerator.open()?;
        assert!(instance.supports(method), "{} does not support {method}", instance.name());
        let mut buffer = PageBuffer::new(memory.len().div_ceil(PAGE));
        buffer[..memory.len()].copy_from_slice(memory);
        Ok(Self { method, instance, pool: RequestPool::new(REQUESTS), memory: Arc::new(buffer), failed_at: None })
    }

    /// Encodes the memory, as [`RoundTrip::encode`] does.
    pub(super) fn encode(&mut self, pipe: &mut RoundTrip) -> Result<(), MeasureError> {
        for (index, from) in (0..self.memory.len()).step_by(pipe.piece_bytes).enumerate() {
            let to = self.memory.len().min(from + pipe.piece_bytes);
            let mut request = self.free_request(pipe);
            let memory = Arc::clone(&self.memory);
            request.fill(index as u64, self.method, memory, std::iter::once(from..to), to - from - 1);
            let mut refused = self.instance.submit(request).err();
            while let Some(request) = refused {
                self.poll_once(pipe);
                refused = self.instance.submit(request).err();
            }
        }
        while self.pool.in_use() > 0 {
            self.poll_once(pipe);
        }
        black_box(&mut pipe.encoded);
        match self.failed_at.take() {
            Some(at) => Err(MeasureError::Failed { accelerator: self.instance.name(), at }),
            None => Ok(()),
        }
    }

    fn free_request(&mut self, pipe: &mut RoundTrip) -> Box<EncodeRequest> {
        loop {
            match self.pool.take() {
                Some(request) => return request,
                None => self.poll_once(pipe),
            }
        }
    }

    fn poll_once(&mut self, pipe: &mut RoundTrip) {
        let Some(request) = self.instance.poll() else {
            spin_loop();
            return;
        };
        let index = request.tag() as usize;
        let target = &mut pipe.encoded[index * pipe.piece_bytes..][..request.input_bytes()];
        pipe.lens[index] = match request.outcome() {
            EncodeOutcome::Encoded(len) => {
                target[..len].copy_from_slice(request.output());
                len
            }
            EncodeOutcome::Incompressible => {
                let mut end = 0;
                for run in request.input() {
                    target[end..end + run.len()].copy_from_slice(run);
                    end += run.len();
                }
                end
            }
            // The other requests are collected before the error is returned.
            EncodeOutcome::Failed | EncodeOutcome::Pending => {
                self.failed_at.get_or_insert(index * pipe.piece_bytes);
                0
            }
        };
        self.pool.recycle(request);
    }
}
