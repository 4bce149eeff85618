//! shunt's test world: hosts as network namespaces, the runner of conformance cases, and the demo.

pub mod agent;
pub mod deadline;
pub mod interrupt;
pub mod process;
pub mod world;
